"""The most memory that this process has had in RAM, as the operating system counted it."""

import sys
from pathlib import Path

import psutil

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


def reset_peak() -> bool:
    """Count anew from now on; False where the system can't (anything but Linux), so that old peaks stay.

    Source: proc_pid_clear_refs(5).
    """
    try:
        _CLEAR.write_text(_RESET_PEAK, encoding="ascii")
    except OSError:  # no Linux, or a container that forbids it
        return False
    return True


def peak_resident_bytes() -> int:
    """The high-water mark of resident memory since the start, or the last `reset_peak`."""
    if sys.platform == "linux":
        lines = _STATUS.read_text(encoding="ascii", errors="replace").splitlines()
        marks = [line.split()[1] for line in lines if line.startswith("VmHWM:")]
        if marks:
            return int(marks[0]) * 1024
    if sys.platform == "win32":
        return int(psutil.Process().memory_info().peak_wset)
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
