"""A device that fails in the middle of its work, as an error for people."""

from types import TracebackType

from edgeinfer.errors import DeviceError
from edgeinfer_kernels.backend import BackendError


class DeviceFailures:
    """Turns a `BackendError` into a `DeviceError`. A context manager that costs a step next to nothing."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, BackendError):
            raise DeviceError(str(error)) from error


DEVICE_FAILURES = DeviceFailures()
