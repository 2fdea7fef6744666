"""Current and peak resident memory of this process, as the system reports it."""

import sys
from pathlib import Path

import psutil

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"
OWN_PAGES = ("RssAnon", "RssShmem")
"""Status fields of resident pages that aren't file-backed; see proc_pid_status(5)."""


def reset_peak() -> bool:
    """Reset the peak counter. Returns False if the system can't (not Linux); old peaks then remain.

    Source: proc_pid_clear_refs(5).
    """
    try:
        _CLEAR.write_text(_RESET_PEAK, encoding="ascii")
    except OSError:  # no Linux, or a container that forbids it
        return False
    return True


def peak_resident_bytes() -> int:
    """Peak resident memory in bytes since the start, or since the last `reset_peak`."""
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


def own_resident_bytes(status: Path = _STATUS) -> int:
    """Bytes of resident memory that isn't file-backed: pages of mapped files can be reclaimed at any time. If
    the system doesn't report the two separately, all resident memory.
    """
    try:
        lines = status.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        lines = []
    values = dict(line.split(":", 1) for line in lines if ":" in line)
    sizes = [int(values[name].split()[0]) for name in OWN_PAGES if name in values]
    return 1024 * sum(sizes) if sizes else int(psutil.Process().memory_info().rss)
