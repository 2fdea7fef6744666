"""Kernels of a prefill MoE block: assignments grouped by expert, grouped matmul, and weighted sum."""

import triton
import triton.language as tl

from edgeinfer_kernels.cuda.triton_ops.tile_decoding import decode_rows
from edgeinfer_kernels.cuda.triton_ops.tiles import blocks_at, load_tile

TILE_FIELDS = tl.constexpr(3)
"""int32 fields of a tile of rows: the slot of its expert's weights, its first row, and the end of its
expert's rows.
"""


@triton.jit(do_not_specialize=["assignments", "here"])
def group_assignments_kernel(
    ids,
    slots,
    assignment_slots,
    positions,
    tokens,
    row_slots,
    counts,
    assignments,
    here,
    EXPERTS: tl.constexpr,
    EXPERTS_PER_TOKEN: tl.constexpr,
    STEP: tl.constexpr,
):
    """Sort the token-expert assignments by the expert's slot; one program per expert.

    slots (2, EXPERTS): slot of each expert on the device, then on the host, -1: absent; the host's slots
    follow the `here` slots of the device. ids (assignments,): expert of each assignment, USED per token.
    assignment_slots (assignments,): slot of each assignment; positions (assignments,): its index in sorted
    order; tokens and row_slots (assignments,): token and slot in sorted order; counts (EXPERTS,): assignments
    per slot. Reads the ids twice for every expert, from cache.
    """
    expert = tl.program_id(0)
    own, theirs = tl.load(slots + expert), tl.load(slots + EXPERTS + expert)
    expert_slot = tl.where(own >= 0, own, here + theirs)
    offset = tl.arange(0, STEP)
    before = tl.zeros((STEP,), tl.int32)
    for begin in range(0, assignments, STEP):
        assignment = begin + offset
        id = tl.load(ids + assignment, mask=assignment < assignments, other=0)
        device, host = tl.load(slots + id), tl.load(slots + EXPERTS + id)
        other = tl.where(device >= 0, device, here + host)
        before += ((other < expert_slot) & (assignment < assignments)).to(tl.int32)
    first = tl.sum(before, axis=0)
    at = first
    for begin in range(0, assignments, STEP):
        assignment = begin + offset
        mine = tl.load(ids + assignment, mask=assignment < assignments, other=-1) == expert
        position = at + tl.cumsum(mine.to(tl.int32), axis=0) - 1
        tl.store(assignment_slots + assignment, tl.zeros_like(assignment) + expert_slot, mask=mine)
        tl.store(positions + assignment, position, mask=mine)
        tl.store(tokens + position, assignment // EXPERTS_PER_TOKEN, mask=mine)
        tl.store(row_slots + position, tl.zeros_like(assignment) + expert_slot, mask=mine)
        at += tl.sum(mine.to(tl.int32), axis=0)
    tl.store(counts + expert_slot, at - first)


@triton.jit
def tiles_kernel(counts, tiles, SLOTS: tl.constexpr, PADDED_SLOTS: tl.constexpr, BLOCK_M: tl.constexpr):
    """The tiles of BLOCK_M sorted rows, as TILE_FIELDS describes, of all slots with assignments; one program
    per slot. Tiles that are left are not written.
    """
    slot, other = tl.program_id(0), tl.arange(0, PADDED_SLOTS)
    before = tl.load(counts + other, mask=(other < slot) & (other < SLOTS), other=0)
    first = tl.sum(before, axis=0)
    number = tl.sum((before + BLOCK_M - 1) // BLOCK_M, axis=0)
    end = first + tl.load(counts + slot)
    for row in range(first, end, BLOCK_M):
        tile = tiles + TILE_FIELDS * number
        tl.store(tile, slot)
        tl.store(tile + 1, row)
        tl.store(tile + 2, end)
        number += 1


@triton.jit(do_not_specialize=["expert_rows", "stride"])
def expert_product_kernel(
    rows,
    index,
    matrix,
    tiles,
    out,
    expert_rows,
    stride,
    COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,
    TILE: tl.constexpr,
    INDEXED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STEP: tl.constexpr,
):
    """out[r] = row r · the rows of its expert in a stack of matrices with `expert_rows` each, transposed;
    float32.

    Row r is rows[index[r]], or rows[r] without an index, (…, COLUMNS) float16; out has `stride` elements per
    row. Program (BLOCK_N outputs, a tile of BLOCK_M rows); weights are dequantized STEP blocks of a row at a
    time, in the order in which they are stored. Reads an expert's planes once per BLOCK_M rows.
    """
    tile = tiles + TILE_FIELDS * tl.program_id(1)
    slot, first, last = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    if first < last:
        row = first + tl.arange(0, BLOCK_M)
        there = row < last
        taken = tl.load(index + row, mask=there, other=0) if INDEXED else row
        output = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        weights = slot * expert_rows + tl.minimum(output, expert_rows - 1)
        element = tl.arange(0, 32 * STEP)
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for begin in range(0, BLOCKS, STEP):
            stored = blocks_at(begin, STEP, 4)
            b = decode_rows(load_tile(matrix, weights, stored, BLOCKS, BLOCKS % STEP > 0, TILE, 4), TILE)
            place = begin + element // 32
            block = place % (BLOCKS // 8) * 8 + place // (BLOCKS // 8)
            column = tl.where(place < BLOCKS, block * 32, COLUMNS) + element % 32
            column = tl.max_contiguous(tl.multiple_of(column, 32), 32)
            at = rows + taken[:, None] * COLUMNS + column[None, :]
            a = tl.load(at, mask=there[:, None] & (column < COLUMNS)[None, :], other=0.0)
            total = tl.dot(a, tl.trans(b), total)
        to = out + row[:, None] * stride + output[None, :]
        tl.store(to, total, mask=there[:, None] & (output < expert_rows)[None, :])


@triton.jit(do_not_specialize=["count", "stride", "first_out"])
def grouped_product_kernel(
    rows,
    index,
    weights,
    tiles,
    out,
    count,
    stride,
    first_out,
    COLUMNS: tl.constexpr,
    INDEXED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """out[r, first_out…] = row r · weights of its expert (experts, count, COLUMNS) transposed, float32.

    Row r is rows[index[r]], or rows[r] without an index, (…, COLUMNS) float16; out has `stride` elements per
    row. Program (BLOCK_N outputs, a tile of BLOCK_M rows). Reads a tile's rows once per BLOCK_N outputs, an
    expert's weights once per BLOCK_M rows.
    """
    tile = tiles + TILE_FIELDS * tl.program_id(1)
    expert, first, last = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    row = first + tl.arange(0, BLOCK_M)
    there = row < last
    taken = tl.load(index + row, mask=there, other=0) if INDEXED else row
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    column_mask = column < count
    k = tl.arange(0, BLOCK_K)
    left = rows + taken[:, None] * COLUMNS + k[None, :]
    right = weights + (expert * count + column)[None, :] * COLUMNS + k[:, None]
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for begin in range(0, COLUMNS, BLOCK_K):
        a = tl.load(left + begin, mask=there[:, None], other=0.0)
        b = tl.load(right + begin, mask=column_mask[None, :], other=0.0)
        total = tl.dot(a, b, total)
    to = out + row[:, None] * stride + first_out + column[None, :]
    tl.store(to, total, mask=there[:, None] & column_mask[None, :])


@triton.jit(do_not_specialize=["first", "count", "first_slot"])
def add_experts_kernel(
    y,
    scales,
    bias,
    positions,
    slots,
    weights,
    total,
    first,
    count,
    first_slot,
    WIDTH: tl.constexpr,
    EXPERTS_PER_TOKEN: tl.constexpr,
    BLOCK: tl.constexpr,
    BIAS: tl.constexpr,
):
    """total[token] += Σ weight · (scale · y + bias) of the token's experts whose rows are in y.

    Assignment (token, expert) p has row positions[p] - first of y, if this is within `count`; its bias is
    that of expert assignment_slots[p] - first_slot. The order of summation is fixed. Program (BLOCK columns,
    token).
    """
    token = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = column < WIDTH
    sums = tl.load(total + token * WIDTH + column, mask=inside, other=0.0)
    for slot in range(EXPERTS_PER_TOKEN):
        assignment = token * EXPERTS_PER_TOKEN + slot
        row = tl.load(positions + assignment) - first
        here = (row >= 0) & (row < count)
        row = tl.where(here, row, 0)
        value = tl.load(y + row * WIDTH + column, mask=inside & here, other=0.0)
        value = value * tl.load(scales + row, mask=here, other=0.0)
        if BIAS:
            at = (tl.load(slots + assignment) - first_slot) * WIDTH + column
            value += tl.load(bias + at, mask=inside & here, other=0.0)
        sums += tl.load(weights + assignment) * value
    tl.store(total + token * WIDTH + column, sums, mask=inside)
