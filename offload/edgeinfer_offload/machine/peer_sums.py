"""How fast GPUs add up partial sums: measured for a group of them, or assumed from their link."""

from collections.abc import Sequence
from pathlib import Path

from edgeinfer_kernels.cuda.driver import Gpu, list_links
from edgeinfer_offload.machine.hardware import PeerSums
from edgeinfer_offload.machine.measure import stored_figures
from edgeinfer_offload.runtime.rank_processes import RankProcesses

NVLINK = PeerSums("NVLink", 8e-6, 250e9)
"""Symmetric memory of two H200s: 6.4 to 7.6 µs in a graph, and 8 MB in 33 µs."""
PCIE = PeerSums("PCIe", 25e-6, 10e9)
"""Assumed: NCCL through PCI Express 4.0, without peer access."""
NVLINK_CARDS = ("V100", "A100", "H100", "H200", "B200", "B300")
"""Names of cards that are assumed to have NVLink."""
RANK_MODULE = "edgeinfer_offload.machine.peer_sums_rank"
_FIGURES = ("sum_seconds", "bytes_per_second", "symmetric")


def assumed_sums(name: str, *, nvlink: bool = False) -> PeerSums:
    """Those of several cards of this name. `nvlink`: they have such a link."""
    return NVLINK if nvlink or any(card in name.upper() for card in NVLINK_CARDS) else PCIE


def known_sums(gpus: Sequence[Gpu], cache_folder: Path) -> PeerSums | None:
    """What was measured for these GPUs; None: nothing."""
    known, prefix = stored_figures(cache_folder).known(), _prefix(gpus)
    if not all(prefix + name in known for name in _FIGURES):
        return None
    seconds, rate, symmetric = (known[prefix + name] for name in _FIGURES)
    return PeerSums("symmetric memory" if symmetric else "NCCL", seconds, rate)


def expected_sums(gpus: Sequence[Gpu], cache_folder: Path) -> PeerSums | None:
    """As `known_sums`, or what the links of these GPUs make likely; None: they can't exchange sums here."""
    from edgeinfer_kernels.cuda.tensor.torch_collective import can_sum_on_gpus

    known = known_sums(gpus, cache_folder)
    if known is not None or not can_sum_on_gpus():
        return known
    indices = {gpu.index for gpu in gpus}
    links = list_links(max(indices) + 1)
    own = [link for link in links if {link.first, link.second} <= indices]
    return NVLINK if all(link.has_atomics for link in own) else PCIE


def measured_sums(gpus: Sequence[Gpu], cache_folder: Path) -> PeerSums | None:
    """As `known_sums`, measured now if it isn't known, by a process for each GPU; None: torch has no NCCL.

    Raises `RankError` or `BackendError`: the processes failed.
    """
    from edgeinfer_kernels.cuda.tensor.torch_collective import can_sum_on_gpus

    known = known_sums(gpus, cache_folder)
    if known is not None or not can_sum_on_gpus():
        return known
    figures = sum_figures([f"cuda:{gpu.index}" for gpu in gpus])
    prefix = _prefix(gpus)
    stored_figures(cache_folder).keep({prefix + name: value for name, value in figures.items()})
    return known_sums(gpus, cache_folder)


def sum_figures(devices: Sequence[str]) -> dict[str, float]:
    """The slowest figures of a process for each device, as torch names it."""

    def jobs(store: str) -> list[tuple[int, int, str, str]]:
        return [(rank, len(devices), device, store) for rank, device in enumerate(devices)]

    ranks = RankProcesses(RANK_MODULE, jobs, devices)
    try:
        each: list[dict[str, float]] = ranks.ready
    finally:
        ranks.close()
    return {
        "sum_seconds": max(one["sum_seconds"] for one in each),
        "bytes_per_second": min(one["bytes_per_second"] for one in each),
        "symmetric": min(one["symmetric"] for one in each),
    }


def _prefix(gpus: Sequence[Gpu]) -> str:
    return f"sums of {'+'.join(gpu.uuid or str(gpu.index) for gpu in gpus)} "
