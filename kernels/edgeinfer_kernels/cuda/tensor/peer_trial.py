"""Tries the kernels that exchange partial sums and logits between the ranks, before they are used."""

import torch
from torch import Tensor

from edgeinfer_kernels.cuda.tensor.logit_kernels import LOGIT_COLUMNS, LOGIT_WARPS, gather_logits_kernel
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
    """Sums over the ranks of rows of one number, added to `x`, for trials and measurements; all ranks add up
    together.
    """

    def __init__(self, peers: PeerInboxes, tokens: int) -> None:
        self._peers, device, columns = peers, peers.device, peers.columns
        self._blocks = padded_blocks(columns)
        self._y, self.x = (each((tokens, columns), device=device) for each in (torch.ones, torch.zeros))
        self._words = torch.zeros((tokens, INTEGER_PLANES, self._blocks), dtype=torch.int32, device=device)
        self._squares = torch.zeros((tokens, -(-columns // 16)), device=device)

    def fill(self, value: float) -> None:
        """The number in this rank's rows, 1 at first."""
        self._y.fill_(value)

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
    """Whether sums of a step are right here, each of another number; all ranks try together."""
    sums, expected = StepSums(peers, peers.tokens), 0
    for number in range(1, SUMS + 1):
        sums.fill(number)
        expected += number * peers.ranks
        if not bool((sums.add_up() == expected).all()):
            return False
    return True


def logits_are_gathered(peers: PeerInboxes) -> bool:
    """As `steps_add_up`, of logits."""
    tokens, columns, ranks = peers.tokens, peers.columns, peers.ranks
    own = torch.empty((tokens, columns), device=peers.device)
    logits = torch.empty((tokens, ranks, columns), device=peers.device)
    rank_numbers = torch.arange(ranks, device=peers.device)[None, :, None]
    for number in range(1, SUMS + 1):
        own.fill_(number * ranks + peers.rank)
        gather_logits_kernel[(-(-columns // LOGIT_COLUMNS), tokens)](
            peers.args, own, logits, tuple(rank * columns for rank in range(ranks + 1)),
            VOCABULARY=ranks * columns, COLUMNS=LOGIT_COLUMNS, POLLS=TRIAL_POLLS, DEPENDENT=False,
            num_warps=LOGIT_WARPS,
        )  # fmt: skip
        if not bool((logits == number * ranks + rank_numbers).all()):
            return False
    return True


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
