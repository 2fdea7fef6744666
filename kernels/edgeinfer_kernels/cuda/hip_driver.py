"""Queries AMD's runtime for the GPUs, without torch. Experimental: read about, not run by us."""

import ctypes

NAME_BYTES = 256
LIBRARIES = ("libamdhip64.so", "libamdhip64.so.7", "libamdhip64.so.6", "amdhip64_7.dll", "amdhip64_6.dll")


def amd_gpus() -> list[tuple[str, int]]:
    """(name, bytes of memory) of each GPU; empty without the runtime. Source: hip_runtime_api.h."""
    library = _library()
    count = ctypes.c_int()
    if library is None or library.hipInit(0) != 0 or library.hipGetDeviceCount(ctypes.byref(count)) != 0:
        return []
    gpus = []
    for index in range(count.value):
        name, total = ctypes.create_string_buffer(NAME_BYTES), ctypes.c_size_t()
        failed = library.hipDeviceGetName(name, NAME_BYTES, index) or library.hipDeviceTotalMem(
            ctypes.byref(total), index
        )
        if not failed:
            gpus.append((name.value.decode(errors="replace"), total.value))
    return gpus


def _library() -> ctypes.CDLL | None:
    for name in LIBRARIES:
        try:
            return ctypes.CDLL(name)
        except OSError:  # No runtime under that name.
            continue
    return None
