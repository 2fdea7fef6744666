"""Profiles the work of a CUDA device during a call, and its peak memory."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping

import torch
from torch.autograd import DeviceType

OTHERS = "everything else"


def device_work(run: Callable[[], object], kinds: Mapping[str, str]) -> dict[str, list[float]]:
    """Seconds of each device operation during `run`, by kind; kinds may overlap in time.

    `kinds`: lower-case substring of an operation's name -> kind; all others are OTHERS.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        time.sleep(0.01)  # Profiler records arrive slightly later.
    spent: dict[str, list[float]] = defaultdict(list)
    for event in profile.events():
        if event.device_type == DeviceType.CUDA:
            kinds_of_event = (kind for word, kind in kinds.items() if word in event.name.lower())
            spent[next(kinds_of_event, OTHERS)].append(event.time_range.elapsed_us() / 1e6)
    return dict(spent)


def release_pinned() -> None:
    """Return unused pinned main memory to the system; torch keeps it for later allocations."""
    release = getattr(torch._C, "_host_emptyCache", None)  # Builds with CUDA have it.
    if release is not None:
        release()


class MemoryMark:
    """Measures the memory that a device allocates from this point on.

    Create it after libraries are loaded, which happens once per process; their memory is not counted.
    """

    def __init__(self, device: torch.device) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        self._device = device
        self._free, _ = torch.cuda.mem_get_info(device)
        self._reserved = torch.cuda.memory_reserved(device)

    def held(self) -> int:
        """Bytes that are allocated now."""
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self._device)
        return int(self._free - free)

    def at_most(self) -> int:
        """Peak bytes: torch reports its peak, and other allocations are counted as still held."""
        free, _ = torch.cuda.mem_get_info(self._device)
        others = self._free - free - (torch.cuda.memory_reserved(self._device) - self._reserved)
        return int(max(others, 0) + torch.cuda.max_memory_reserved(self._device) - self._reserved)
