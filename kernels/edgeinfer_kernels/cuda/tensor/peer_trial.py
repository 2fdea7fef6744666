"""Tries the kernels that add up partial sums over the ranks, before they are used."""

import torch
from torch import Tensor

from edgeinfer_kernels.cuda.tensor.peer_columns import sum_columns_kernel
from edgeinfer_kernels.cuda.tensor.peer_kernels import SUM_COLUMNS, SUM_WARPS, sum_residual_kernel
from edgeinfer_kernels.cuda.tensor.peer_memory import BUFFERS, PeerInboxes, PeerRows
from edgeinfer_kernels.cuda.triton_ops.kernel_args import WordsConfig
from edgeinfer_kernels.cuda.weights.plane_formats import padded_blocks

TRIAL_POLLS = 1 << 20
"""About a second: a rank whose number doesn't arrive makes the trial fail."""
INTEGER_PLANES, COLUMNS = 12, 256
SUMS = 3
"""Sums of a trial: the third one replaces the words of the first."""


class StepSums:
    """Sums of rows of ones over the ranks, added to `x`, for trials and measurements; all ranks add up
    together.
    """

    def __init__(self, peers: PeerInboxes, tokens: int) -> None:
        self._peers, device, columns = peers, peers.device, peers.columns
        self._blocks = padded_blocks(columns)
        self._y, self.x = (each((tokens, columns), device=device) for each in (torch.ones, torch.zeros))
        self._words = torch.zeros((tokens, INTEGER_PLANES, self._blocks), dtype=torch.int32, device=device)
        self._squares = torch.zeros((tokens, -(-columns // 16)), device=device)

    def add_up(self) -> Tensor:
        """x += their sum; returns x."""
        tokens, columns = self.x.shape
        sum_residual_kernel[(-(-columns // SUM_COLUMNS), tokens)](
            self._peers.args, self._y, columns, self.x, 1.0, self._squares, self._words, self._squares,
            WIDTH=columns, COLUMNS=SUM_COLUMNS, OUT=WordsConfig(self._blocks, INTEGER_PLANES),
            POLLS=TRIAL_POLLS, GAIN=False, DEPENDENT=False, num_warps=SUM_WARPS,
        )  # fmt: skip
        return self.x


def steps_add_up(peers: PeerInboxes) -> bool:
    """Whether sums of a step are right here; all ranks try together."""
    sums = StepSums(peers, peers.tokens)
    return all(bool((sums.add_up() == number * peers.ranks).all()) for number in range(1, SUMS + 1))


def chunks_add_up(peers: PeerRows) -> bool:
    """As `steps_add_up`, of both buffers of a chunk."""
    tokens, columns = peers.own(0).shape
    total = torch.zeros_like(peers.own(0))
    works = True
    for number in range(BUFFERS):
        peers.own(number).fill_(1.0 + number)
        peers.own_scales(number).fill_(2.0)
        sum_columns_kernel[(tokens,)](
            peers.args(number), columns, 0, tokens, total,
            COLUMNS=columns, BLOCK=COLUMNS, POLLS=TRIAL_POLLS, num_warps=4,
        )  # fmt: skip
        works &= bool((total == peers.ranks * 2.0 * (1.0 + number)).all())
    return works
