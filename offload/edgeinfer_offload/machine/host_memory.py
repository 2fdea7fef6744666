"""Main memory that this process may still use: free memory, limited by its cgroups."""

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil


@dataclass(frozen=True)
class HostMemory:
    """Main memory in bytes; `limit_bytes` is the tightest cgroup limit, None if there is none."""

    total_bytes: int
    free_bytes: int
    limit_bytes: int | None


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Measure main memory now; reclaimable page cache counts as free.

    A container sees the memory of the whole machine, but is killed at its cgroup's limit. Each limit from the
    process's cgroup up to the root therefore bounds the free memory. `root` contains /proc and /sys.
    """
    machine = psutil.virtual_memory()
    total, free = int(machine.total), int(machine.available)
    limits: list[int] = []
    for folder in _cgroup_folders(root):
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        if limit is None or limit >= total:
            continue
        limits.append(limit)
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes") or 0
        free = min(free, max(0, limit - used + _reclaimable(folder)))
    return HostMemory(total, free, min(limits, default=None))


def _cgroup_folders(root: Path) -> list[Path]:
    """The memory cgroups of this process, innermost first; version 2 and version 1."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        # Not Linux: no cgroups.
        return []
    folders: list[Path] = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        own = PurePosixPath(path.lstrip("/"))
        folders += [top / part for part in (own, *own.parents)]
    return folders


def _reclaimable(folder: Path) -> int:
    """Bytes of file cache that count against the cgroup but can be reclaimed at once."""
    try:
        text = (folder / "memory.stat").read_text()
    except OSError:
        return 0
    counts = dict(line.split() for line in text.splitlines() if len(line.split()) == 2)
    return int(counts.get("inactive_file", counts.get("total_inactive_file", 0)))


def _number(file: Path) -> int | None:
    """The number in a cgroup file; None if the file is missing or contains "max"."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
