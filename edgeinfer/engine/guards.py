"""What an engine runs under: one computation at a time, as long as it may be used; device failures become
user-facing errors.
"""

import os
import threading
from collections.abc import Callable
from types import TracebackType

from edgeinfer.errors import DeviceError, EdgeInferError, ModelFileError
from edgeinfer_kernels.backend import BackendError
from edgeinfer_kernels.system.locks import fork_safe_lock
from edgeinfer_quant_formats.errors import FormatError


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
        thread = threading.get_ident()
        if self._owner == thread and self._lock.locked():
            raise EdgeInferError(
                "the model is computing on this thread: a callback can't call it; call it after the callback"
            )
        with self._next:
            self._lock.acquire()
        self._owner = thread

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._owner = None
        self._lock.release()


class UsePermission:
    """Whether an engine may be used: until `end`, in this process or also in forked children.

    `check_file` raises `FormatError` if the file from which weights are read has been truncated.
    """

    def __init__(self, check_file: Callable[[], None] | None = None, *, is_fork_safe: bool = True) -> None:
        self.check_file = check_file
        self._has_ended = False
        self._process = None if is_fork_safe else os.getpid()
        """The only process that may use the engine; None: forked children may."""

    def end(self) -> None:
        """The engine is closed: it may not be used any more."""
        self._has_ended = True

    def check(self) -> None:
        """Raise if the engine is closed, or can't be used in this process, or its file was truncated."""
        if self._has_ended:
            raise EdgeInferError("the model has been closed; load it again")
        if self._process is not None and self._process != os.getpid():
            raise EdgeInferError(
                "a forked child cannot use the GPU of its parent: load the model in the child, or start the "
                "child with multiprocessing's 'spawn'"
            )
        try:
            if self.check_file is not None:
                self.check_file()
        except FormatError as error:
            raise ModelFileError(str(error)) from error


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
