"""A process that measures the sums of a group of GPUs on one of them, for `peer_sums.py`."""

from collections.abc import Callable

from edgeinfer_kernels.cuda.current_device import current
from edgeinfer_kernels.cuda.device_parts import named_device
from edgeinfer_kernels.cuda.tensor.sum_speed import sum_speed
from edgeinfer_kernels.cuda.tensor.torch_collective import PEERS, SYMMETRIC, TorchCollective, join_group
from edgeinfer_offload.runtime.rank_service import run_rank


class PeerSumsRank:
    """Measures when it is created; as `RankService`. `job`: rank, ranks, device and store."""

    each_replies: frozenset[str] = frozenset()

    def __init__(self, job: tuple[int, int, str, str], on_progress: Callable[[int, int], None]) -> None:
        self.rank, ranks, name, store = job
        device = named_device(name)
        with current(device):
            join_group(device, store, self.rank, ranks)
            collective = TorchCollective(device, store, "auto")
            seconds, rate = sum_speed(collective, device)
        self._figures = {
            "sum_seconds": seconds,
            "bytes_per_second": rate,
            "symmetric": float(collective.kind in (PEERS, SYMMETRIC)),
        }

    def ready(self) -> dict[str, float]:
        return self._figures


if __name__ == "__main__":
    run_rank(PeerSumsRank)
