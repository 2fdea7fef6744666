"""Converts errors of a device or its compiler to messages that a user can act on."""

from collections.abc import Iterator
from contextlib import contextmanager

from edgeinfer_kernels.backend import BackendError
from edgeinfer_kernels.cuda.device_memory import DeviceMemoryError


class KernelsUnavailableError(RuntimeError):
    """Triton cannot compile here; the message names what is missing."""


@contextmanager
def device_errors() -> Iterator[None]:
    """Convert failures of the device and of the compiler to readable errors."""
    try:
        yield
    except (BackendError, DeviceMemoryError, ValueError):
        raise
    except RuntimeError as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        if "C compiler" in str(error):
            raise KernelsUnavailableError(
                "Triton needs a C compiler to start kernels: install gcc or clang, or name one in CC"
            ) from error
        raise BackendError(f"the GPU failed ({lines[0]}); load the model again") from error
