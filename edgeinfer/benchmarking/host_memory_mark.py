"""How much main memory this process has taken since a moment: its own pages, and pinned ones."""

import gc
from pathlib import Path

import psutil
import torch

OWN_PAGES = ("RssAnon", "RssShmem")
"""Resident pages that aren't a file's; see proc(5)."""


class HostMemoryMark:
    """Main memory that is taken from here on; pages of mapped files don't count, they can be given up."""

    def __init__(self) -> None:
        gc.collect()
        self._pages, self._pinned = own_pages(), pinned_bytes()

    def held(self) -> int:
        """Bytes that are taken now."""
        return own_pages() - self._pages + pinned_bytes() - self._pinned


def own_pages(status: Path = Path("/proc/self/status")) -> int:
    """Bytes of this process's resident pages that no file backs; where the system doesn't tell, all."""
    try:
        lines = status.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        lines = []
    facts = dict(line.split(":", 1) for line in lines if ":" in line)
    found = [int(facts[name].split()[0]) for name in OWN_PAGES if name in facts]
    return 1024 * sum(found) if found else int(psutil.Process().memory_info().rss)


def pinned_bytes() -> int:
    """Bytes that torch has pinned and handed out, which are the driver's pages and no process's."""
    if not torch.cuda.is_available():
        return 0
    return int(torch.cuda.host_memory_stats().get("active_bytes.current", 0))
