"""macOS: values of `sysctl`, and functions of its C library. Read about, not run by us."""

import ctypes
import sys


def sysctl_number(name: str) -> int | None:
    """An integer that `sysctl` knows under this name; None: unknown, or another system."""
    if sys.platform != "darwin":
        return None
    value, size = ctypes.c_int64(0), ctypes.c_size_t(8)
    failed = ctypes.CDLL(None).sysctlbyname(
        name.encode(), ctypes.byref(value), ctypes.byref(size), None, ctypes.c_size_t(0)
    )
    return None if failed else value.value
