"""A device that fails in the middle of its work, as an error for people."""

from collections.abc import Iterator
from contextlib import contextmanager

from edgeinfer.errors import DeviceError
from edgeinfer_kernels.backend import BackendError


@contextmanager
def device_failures() -> Iterator[None]:
    """Turn a `BackendError` into a `DeviceError`."""
    try:
        yield
    except BackendError as error:
        raise DeviceError(str(error)) from error
