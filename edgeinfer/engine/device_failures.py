"""Converts device failures during inference to user-facing errors."""

from types import TracebackType

from edgeinfer.errors import DeviceError
from edgeinfer_kernels.backend import BackendError


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
