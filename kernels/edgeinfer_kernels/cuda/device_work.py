"""What a CUDA device was at while something ran, and how much of its memory that took."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping

import torch
from torch.autograd import DeviceType

OTHERS = "everything else"


def device_work(run: Callable[[], object], kinds: Mapping[str, str]) -> dict[str, list[float]]:
    """Seconds of each piece of work that the device did for `run`, by kind; kinds overlap in time.

    `kinds`: what is in the name of a piece of work, lower case -> what it is; others are OTHERS.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        run()
        time.sleep(0.01)  # what is recorded comes a little later
    spent: dict[str, list[float]] = defaultdict(list)
    for event in profile.events():
        if event.device_type == DeviceType.CUDA:
            found = (kind for word, kind in kinds.items() if word in event.name.lower())
            spent[next(found, OTHERS)].append(event.time_range.elapsed_us() / 1e6)
    return dict(spent)


def release_pinned() -> None:
    """Give the system back pinned main memory that nobody has any more: torch keeps it for who comes next."""
    release = getattr(torch._C, "_host_emptyCache", None)  # builds with CUDA have it
    if release is not None:
        release()


class MemoryMark:
    """How much of the current device's memory is taken from here on.

    To be made when libraries have been loaded, which a process does once: they keep what they took before.
    """

    def __init__(self) -> None:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self._free, _ = torch.cuda.mem_get_info()
        self._reserved = torch.cuda.memory_reserved()

    def held(self) -> int:
        """Bytes that are taken now."""
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        return int(self._free - free)

    def at_most(self) -> int:
        """Bytes at the worst moment: torch tells its own peak, what others have taken they still have."""
        free, _ = torch.cuda.mem_get_info()
        others = self._free - free - (torch.cuda.memory_reserved() - self._reserved)
        return int(max(others, 0) + torch.cuda.max_memory_reserved() - self._reserved)
