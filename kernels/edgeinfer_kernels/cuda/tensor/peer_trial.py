"""Tries the kernel that adds up partial sums in the memory of all ranks, before it is used."""

import torch

from edgeinfer_kernels.cuda.tensor.peer_kernels import sum_norm_kernel
from edgeinfer_kernels.cuda.tensor.peer_memory import BUFFERS, PeerRows
from edgeinfer_kernels.cuda.triton_ops.kernel_args import NormArgs, NormConfig, WordsConfig
from edgeinfer_kernels.cuda.tuning.step_shapes import next_power_of_two
from edgeinfer_kernels.cuda.weights.plane_formats import padded_blocks

TRIAL_POLLS = 1 << 20
"""About a second: a rank whose number doesn't arrive makes the trial fail."""
INTEGER_PLANES = 12


def peers_add_up(peers: PeerRows, device: torch.device) -> bool:
    """Whether sums of both buffers are right here; all ranks try together."""
    tokens, columns = peers.own(0).shape
    x = torch.zeros((tokens, columns), dtype=torch.float32, device=device)
    blocks = padded_blocks(columns)
    words = torch.zeros((tokens, INTEGER_PLANES, blocks), dtype=torch.int32, device=device)
    norm = NormArgs(x, x, 0.0)
    config = NormConfig(columns, next_power_of_two(-(-columns // 16)), True, False, False, False, False)
    for number in range(BUFFERS):
        peers.own(number).fill_(1.0 + number)
        sum_norm_kernel[(tokens,)](
            peers.args(number), columns, x, 1.0, norm, norm, words,
            NORM=config, OUT=WordsConfig(blocks, INTEGER_PLANES), POLLS=TRIAL_POLLS, DEPENDENT=False,
            num_warps=8,
        )  # fmt: skip
    expected = peers.ranks * sum(1.0 + number for number in range(BUFFERS))
    return bool((x == expected).all())
