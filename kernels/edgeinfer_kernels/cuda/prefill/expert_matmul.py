"""Grouped matmul of prefill tokens with several experts, their weighted sum, and the tile configs."""

import math
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from edgeinfer_kernels.cuda.prefill.grouped_kernels import add_experts_kernel, grouped_product_kernel

SUM_COLUMNS = 1024


class GroupedTile(NamedTuple):
    """The tile config of `grouped_product_kernel`."""

    rows: int
    outputs: int
    columns: int


def grouped_tile(capability: int) -> GroupedTile:
    """The tile config; small tiles if Triton has no tensor cores to use, because sums are then in
    registers.
    """
    return GroupedTile(32, 32, 32) if 0 < capability < 80 else GroupedTile(64, 128, 64)


@dataclass(frozen=True)
class ExpertRows:
    """The token-expert assignments of a chunk, all int32 except the weights.

    `slots`: slot of each assignment's expert, first those of the device, then those of the host.
    `positions`: index of each assignment in the order sorted by slot. `tokens` and `row_slots`: token and
    slot in sorted order.
    """

    slots: Tensor
    weights: Tensor
    positions: Tensor
    tokens: Tensor
    row_slots: Tensor


def grouped_product(
    rows: Tensor,
    index: Tensor | None,
    weights: Tensor,
    tiles: Tensor,
    out: Tensor,
    first_out: int,
    tile: GroupedTile,
) -> None:
    """out[r, first_out…] float32 = row r · its expert's weights transposed; see `grouped_product_kernel`.

    rows (…, columns) and weights (experts, outputs, columns) float16, tiles (tiles, TILE_FIELDS) int32.
    """
    _, count, columns = weights.shape
    grouped_product_kernel[(-(-count // tile.outputs), len(tiles))](
        rows, index, weights, tiles, out, count, out.stride(0), first_out,
        COLUMNS=columns, INDEXED=index is not None, BLOCK_M=tile.rows, BLOCK_N=tile.outputs,
        BLOCK_K=math.gcd(columns, tile.columns), num_warps=4, num_stages=3,
    )  # fmt: skip


def add_experts(
    y: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    assignments: ExpertRows,
    total: Tensor,
    first: int,
    count: int,
    first_slot: int,
) -> None:
    """total (tokens, hidden_size) += the weighted results of `count` sorted rows from `first` on; see
    `add_experts_kernel`.
    """
    tokens, width = total.shape
    add_experts_kernel[(-(-width // SUM_COLUMNS), tokens)](
        y, scales, bias, assignments.positions, assignments.slots, assignments.weights, total, first,
        count, first_slot,
        WIDTH=width, EXPERTS_PER_TOKEN=len(assignments.slots) // tokens, BLOCK=SUM_COLUMNS,
        BIAS=bias is not None,
    )  # fmt: skip
