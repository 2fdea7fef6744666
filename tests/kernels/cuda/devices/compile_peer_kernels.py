"""Compiles the kernels that add up partial sums over ranks for a GPU that needn't be there, and prints their
resources.
"""

import sys

import torch

from edgeinfer_kernels.cuda.tensor.chunk_sums import LOADED
from edgeinfer_kernels.cuda.tensor.peer_columns import sum_columns_kernel
from edgeinfer_kernels.cuda.tensor.peer_kernels import sum_norm_kernel
from edgeinfer_kernels.cuda.triton_ops.kernel_args import NormArgs, NormConfig, PeerArgs, WordsConfig
from edgeinfer_kernels.cuda.tuning.step_shapes import next_power_of_two
from edgeinfer_kernels.cuda.tuning.targets import compile_launch, recorded_launches
from edgeinfer_kernels.cuda.weights.plane_formats import padded_blocks

TOKENS = 16
CASES = ((2, 4096, False), (2, 8192, False), (4, 5120, True))
"""Ranks, columns, and whether there is a post-norm."""


def tensor(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def peer_args(ranks: int, columns: int) -> PeerArgs:
    arrived = [tensor(ranks * TOKENS, dtype=torch.int64) for _ in range(ranks)]
    rows = tuple(tensor(TOKENS, columns) for _ in range(ranks))
    scales = tuple(tensor(TOKENS) for _ in range(ranks))
    numbers = tensor(TOKENS, dtype=torch.int64)
    return PeerArgs(rows, tuple(arrived), arrived[1], numbers, 1, TOKENS, scales)


def launch_columns(ranks: int, columns: int) -> None:
    sum_columns_kernel[(TOKENS,)](
        peer_args(ranks, columns), columns, columns // 2, TOKENS, tensor(TOKENS, columns),
        COLUMNS=columns // 2, BLOCK=LOADED // ranks, POLLS=1 << 26, num_warps=8,
    )  # fmt: skip


def launch(ranks: int, columns: int, has_post_norm: bool, dependent: bool) -> None:
    blocks, peers = padded_blocks(columns), peer_args(ranks, columns)
    norm = NormArgs(tensor(columns), tensor(columns), 1e-5)
    config = NormConfig(
        columns, next_power_of_two(-(-columns // 16)), True, has_post_norm, True, False, False
    )
    extra = {"launch_pdl": True} if dependent else {}
    sum_norm_kernel[(TOKENS,)](
        peers, columns, tensor(TOKENS, columns), 1.0, norm, norm,
        tensor(TOKENS, 12, blocks, dtype=torch.int32), NORM=config, OUT=WordsConfig(blocks, 12),
        POLLS=1 << 26, DEPENDENT=dependent, num_warps=8, **extra,
    )  # fmt: skip


def main() -> None:
    capability = int(sys.argv[1])
    for case in CASES:
        with recorded_launches() as launches:
            launch(*case, dependent=capability >= 90)
            launch_columns(*case[:2])
        for each in launches:
            print(each.name, *case, compile_launch(each, capability), flush=True)


if __name__ == "__main__":
    main()
