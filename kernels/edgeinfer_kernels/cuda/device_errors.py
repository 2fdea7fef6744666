"""What goes wrong on a device or in its compiler, in words that a person can act on."""

from collections.abc import Iterator
from contextlib import contextmanager

from edgeinfer_kernels.backend import BackendError
from edgeinfer_kernels.cuda.device_memory import DeviceMemoryError


class KernelsUnavailableError(RuntimeError):
    """Triton can't compile here; the text says what it misses."""


@contextmanager
def device_errors() -> Iterator[None]:
    """Failures of the device and of the compiler as errors that a person can read."""
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
