"""How much main memory this process may still take: what is free, less what its cgroups forbid."""

from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import psutil


@dataclass(frozen=True)
class HostMemory:
    """Main memory in bytes; `limit_bytes` is the tightest cgroup limit, None where there is none."""

    total_bytes: int
    free_bytes: int
    limit_bytes: int | None


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Measure main memory now; page cache that can be given up counts as free.

    Containers see the whole machine's memory but die at their cgroup's limit, so each limit from the
    process's own cgroup up to the root bounds what is free. `root` is where /proc and /sys lie.
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
        # No Linux, no cgroups.
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
    """Bytes of file cache that count against the cgroup but can be given up at once."""
    try:
        text = (folder / "memory.stat").read_text()
    except OSError:
        return 0
    counts = dict(line.split() for line in text.splitlines() if len(line.split()) == 2)
    return int(counts.get("inactive_file", counts.get("total_inactive_file", 0)))


def _number(file: Path) -> int | None:
    """The number in a cgroup file; None where the file isn't there or says "max"."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None
