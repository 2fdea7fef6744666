"""What an engine runs under: one computation at a time; device failures become user-facing errors."""

import threading
from types import TracebackType

from edgeinfer.errors import DeviceError, EdgeInferError
from edgeinfer_kernels.backend import BackendError
from edgeinfer_kernels.system.locks import fork_safe_lock


class ModelLock:
    """A lock for `with`; a thread that releases it in a loop lets those that wait go first.

    Raises:
        EdgeInferError: on entering, if the same thread holds it: a callback called the model.
    """

    def __init__(self) -> None:
        self._lock = fork_safe_lock()
        self._next = fork_safe_lock()
        """Held by the one thread that waits for the lock."""
        self._owner: int | None = None

    def __enter__(self) -> None:
        if self._owner == threading.get_ident() and self._lock.locked():
            raise EdgeInferError(
                "the model is computing on this thread: a callback can't call it; call it after the callback"
            )
        with self._next:
            self._lock.acquire()
        self._owner = threading.get_ident()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._owner = None
        self._lock.release()


class DeviceFailures:
    """Raises a `BackendError` as a `DeviceError`. A context manager with negligible cost per step."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, BackendError):
            raise DeviceError(str(error)) from error


DEVICE_FAILURES = DeviceFailures()
