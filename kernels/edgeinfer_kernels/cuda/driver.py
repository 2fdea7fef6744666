"""Queries NVIDIA's driver, or AMD's runtime, for the GPUs, without torch, a context or device memory."""

import ctypes
import ctypes.util
from dataclasses import dataclass

from edgeinfer_kernels.cuda.hip_driver import amd_gpus

OLDEST_CAPABILITY = 75
"""Turing: the oldest that Triton compiles for."""
AMD_CAPABILITY = 75
"""The compute capability whose tiles AMD's GPUs take: they have 64 KiB of shared memory too, and no
programmatic dependent launch.
"""
_NAME_BYTES = 128
_MAJOR, _MINOR = 75, 76
"""CUdevice_attribute numbers of the compute capability."""


@dataclass(frozen=True)
class Gpu:
    """A GPU: index, name, compute capability (such as 90; AMD_CAPABILITY for AMD's) and memory in bytes."""

    index: int
    name: str
    capability: int
    total_bytes: int


def list_gpus() -> list[Gpu]:
    """The GPUs that NVIDIA's driver lists, or else AMD's runtime; empty without either. Source: cuda.h."""
    library = _library()
    if library is None or library.cuInit(0) != 0:
        return [Gpu(index, name, AMD_CAPABILITY, total) for index, (name, total) in enumerate(amd_gpus())]
    count = ctypes.c_int()
    if library.cuDeviceGetCount(ctypes.byref(count)) != 0:
        return []
    return [gpu for index in range(count.value) if (gpu := _describe(library, index))]


def driver_version() -> int:
    """The newest CUDA version that the driver supports, such as 13000; 0 without a driver."""
    library, version = _library(), ctypes.c_int()
    if library is None or library.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return 0
    return version.value


def _library() -> ctypes.CDLL | None:
    for name in ("libcuda.so.1", "nvcuda.dll"):
        try:
            return ctypes.CDLL(name)
        except OSError:  # No driver under that name.
            continue
    return None


def _describe(library: ctypes.CDLL, index: int) -> Gpu | None:
    device = ctypes.c_int()
    if library.cuDeviceGet(ctypes.byref(device), index) != 0:
        return None
    name, total = ctypes.create_string_buffer(_NAME_BYTES), ctypes.c_size_t()
    major, minor = ctypes.c_int(), ctypes.c_int()
    failed = (
        library.cuDeviceGetName(name, _NAME_BYTES, device)
        or library.cuDeviceTotalMem_v2(ctypes.byref(total), device)
        or library.cuDeviceGetAttribute(ctypes.byref(major), _MAJOR, device)
        or library.cuDeviceGetAttribute(ctypes.byref(minor), _MINOR, device)
    )
    if failed:
        return None
    text = name.value.decode(errors="replace")
    return Gpu(index, text, 10 * major.value + minor.value, total.value)
