"""Grouped matmul of prefill tokens with several experts, their weighted sum, and the tile configs."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from edgeinfer_kernels.cuda.prefill.grouped_kernels import (
    add_experts_kernel,
    expert_product_kernel,
    grouped_product_kernel,
    tiles_kernel,
)
from edgeinfer_kernels.cuda.tuning.step_shapes import next_power_of_two
from edgeinfer_kernels.cuda.weights.packing import DeviceMatrix

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


class ExpertTile(NamedTuple):
    """The tile config of `expert_product_kernel`. `blocks`: of a row that are dequantized at a time."""

    rows: int
    outputs: int
    blocks: int
    warps: int


def expert_tile(capability: int, assignments: int, experts: int) -> ExpertTile:
    """The tile config; tiles have about as many rows as an expert has assignments, on average. Small tiles
    as in `grouped_tile`.
    """
    rows = max(16, next_power_of_two(assignments // max(1, experts)))
    if 0 < capability < 80:
        return ExpertTile(min(rows, 32), 32, 1, 4)
    if rows == 16:
        return ExpertTile(16, 64, 8, 4)
    return ExpertTile(32, 128, 4, 4) if rows == 32 else ExpertTile(64, 128, 4, 8)


def max_tiles(assignments: int, experts: int, rows: int) -> int:
    """The largest number of tiles of `rows` rows."""
    return min(experts, assignments) + assignments // rows


def sorted_tiles(counts: Tensor, assignments: int, rows: int) -> Tensor:
    """The tiles of all sorted rows, (tiles, TILE_FIELDS) int32, from the assignments per slot, without
    waiting for these; tiles that are left are empty.
    """
    slots = len(counts)
    tiles = torch.zeros((max_tiles(assignments, slots, rows), 3), dtype=torch.int32, device=counts.device)
    tiles_kernel[(slots,)](
        counts, tiles, SLOTS=slots, PADDED_SLOTS=next_power_of_two(slots), BLOCK_M=rows, num_warps=4
    )
    return tiles


@dataclass(frozen=True)
class ExpertRows:
    """The token-expert assignments of a chunk, all int32 except the weights.

    `slots`: slot of each assignment's expert, first those of the device, then those of the host.
    `positions`: index of each assignment in the order sorted by slot. `tokens` and `row_slots`: token and
    slot in sorted order. `row_weights`: the weights in sorted order, if they multiply what experts read;
    `weights` are 1 then.
    """

    slots: Tensor
    weights: Tensor
    positions: Tensor
    tokens: Tensor
    row_slots: Tensor
    row_weights: Tensor | None = None


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


def expert_product(
    rows: Tensor,
    index: Tensor | None,
    matrix: DeviceMatrix,
    expert_rows: int,
    tiles: Tensor,
    tile: ExpertTile,
    out: Tensor,
) -> None:
    """out[r] float32 = row r · its expert's matrix transposed; see `expert_product_kernel`."""
    shapes = matrix.shapes
    expert_product_kernel[(-(-expert_rows // tile.outputs), len(tiles))](
        rows, index, matrix.parts, tiles, out, expert_rows, out.stride(0),
        COLUMNS=shapes.columns, BLOCKS=shapes.blocks, TILE=shapes.tile, INDEXED=index is not None,
        BLOCK_M=tile.rows, BLOCK_N=tile.outputs, STEP=tile.blocks, num_warps=tile.warps,
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
