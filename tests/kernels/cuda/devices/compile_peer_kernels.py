"""Compiles the kernels of sums over ranks and of gathered logits for a GPU that needn't be there, and prints
their resources.
"""

import sys

import torch

from edgeinfer_kernels.cuda.decode.captured_steps import RING
from edgeinfer_kernels.cuda.tensor.chunk_sums import LOADED
from edgeinfer_kernels.cuda.tensor.logit_kernels import (
    LOGIT_COLUMNS,
    LOGIT_WARPS,
    best_of_ranks_kernel,
    gather_logits_kernel,
)
from edgeinfer_kernels.cuda.tensor.peer_columns import sum_columns_kernel
from edgeinfer_kernels.cuda.tensor.peer_kernels import (
    SUM_COLUMNS,
    SUM_WARPS,
    sum_residual_kernel,
    sum_rows_kernel,
)
from edgeinfer_kernels.cuda.triton_ops.kernel_args import (
    InboxArgs,
    PeerArgs,
    WordsConfig,
)
from edgeinfer_kernels.cuda.tuning.targets import compile_launch, recorded_launches
from edgeinfer_kernels.cuda.weights.plane_formats import padded_blocks
from edgeinfer_kernels.sizes.cuda_buffers import STATE_WORDS

TOKENS = 16
CASES = ((2, 4096, False), (2, 8192, False), (4, 5120, True))
"""Ranks, columns, and whether the activations have floats."""


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def rank_of(ranks: int) -> int:
    """Of two the first; of more the second, whose number is a constant to Triton."""
    return 0 if ranks == 2 else 1


def peer_args(ranks: int, columns: int) -> PeerArgs:
    arrived = [tensor(ranks * TOKENS, dtype=torch.int64) for _ in range(ranks)]
    rows = tuple(tensor(TOKENS, columns) for _ in range(ranks))
    scales = tuple(tensor(TOKENS) for _ in range(ranks))
    numbers = tensor(TOKENS, dtype=torch.int64)
    return PeerArgs(rows, tuple(arrived), arrived[1], numbers, rank_of(ranks), TOKENS, scales)


def inbox_args(ranks: int, columns: int) -> InboxArgs:
    inboxes = tuple(tensor(2 * ranks * TOKENS * columns, dtype=torch.int64) for _ in range(ranks))
    numbers = tensor(TOKENS, columns, dtype=torch.int32)
    return InboxArgs(inboxes, inboxes[1], numbers, rank_of(ranks), TOKENS, columns)


def launch_columns(ranks: int, columns: int) -> None:
    sum_columns_kernel[(TOKENS,)](
        peer_args(ranks, columns), columns, columns // 2, TOKENS, tensor(TOKENS, columns),
        COLUMNS=columns // 2, BLOCK=LOADED // ranks, POLLS=1 << 26, num_warps=8,
    )  # fmt: skip


def launch_logits(ranks: int, dependent: bool) -> None:
    extra = {"launch_pdl": True} if dependent else {}
    peers, firsts = inbox_args(ranks, 64_128), tuple(64_128 * rank for rank in range(ranks + 1))
    gather_logits_kernel[(-(-64_128 // LOGIT_COLUMNS), TOKENS)](
        peers, tensor(TOKENS, 64_128), tensor(TOKENS, firsts[-1]), firsts,
        VOCABULARY=firsts[-1], COLUMNS=LOGIT_COLUMNS, POLLS=1 << 26, DEPENDENT=dependent,
        num_warps=LOGIT_WARPS, **extra,
    )  # fmt: skip
    ids, state = tensor(1, 64_128 // 16, dtype=torch.int32), tensor(STATE_WORDS, dtype=torch.int32)
    best_of_ranks_kernel[(1,)](
        peers, tensor(1, 64_128 // 16), ids, firsts, state, tensor(RING, dtype=torch.int32),
        PROGRAMS=64_128 // 16, RING=RING, POLLS=1 << 26, DEPENDENT=dependent, num_warps=8, **extra,
    )  # fmt: skip


def launch(ranks: int, columns: int, has_floats: bool, dependent: bool) -> None:
    blocks, planes = padded_blocks(columns), 44 if has_floats else 12
    rows, x = tensor(TOKENS, columns), tensor(TOKENS, columns)
    grid = -(-columns // SUM_COLUMNS), TOKENS
    extra = {"launch_pdl": True} if dependent else {}
    for peers in (inbox_args(ranks, columns), None):
        sum_residual_kernel[grid](
            peers, rows, columns, x, 1.0, tensor(columns), tensor(TOKENS, planes, blocks, dtype=torch.int32),
            tensor(TOKENS, columns // 16),
            WIDTH=columns, COLUMNS=SUM_COLUMNS, OUT=WordsConfig(blocks, planes), POLLS=1 << 26, GAIN=True,
            DEPENDENT=dependent, num_warps=SUM_WARPS, **extra,
        )  # fmt: skip
    sum_rows_kernel[grid](
        inbox_args(ranks, columns), rows, columns,
        WIDTH=columns, COLUMNS=SUM_COLUMNS, POLLS=1 << 26, DEPENDENT=dependent, num_warps=SUM_WARPS, **extra,
    )  # fmt: skip


def main() -> None:
    capability = int(sys.argv[1])
    for case in CASES:
        with recorded_launches() as launches:
            launch(*case, dependent=capability >= 90)
            launch_columns(*case[:2])
            launch_logits(case[0], dependent=capability >= 90)
        for each in launches:
            print(each.name, *case, compile_launch(each, capability), flush=True)


if __name__ == "__main__":
    main()
