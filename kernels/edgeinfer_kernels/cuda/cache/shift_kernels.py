"""Context shift of a layer's cache on the device: evicts positions in its middle; see `context_shift`."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from edgeinfer_kernels.cuda.triton_ops.cache_tiles import (
    CACHES,
    Q4_0,
    Q8_0,
    hadamard,
    load_cache_tile,
    ring_rows,
    store_cache_rows,
)
from edgeinfer_kernels.cuda.weights.device_block import DeviceCache
from edgeinfer_kernels.sizes.cuda_matrices import head_dimensions

TILE_ELEMENTS = 2048
"""Elements of keys that a program processes."""


@triton.jit
def _move_rows(origin, base, source, target, mask, WIDTH: tl.constexpr):
    """Copy rows (n,) int64 of WIDTH elements of `origin` to those of `base`, bit by bit."""
    column = tl.arange(0, triton.next_power_of_2(WIDTH))
    inside = mask[:, None] & (column < WIDTH)[None, :]
    moved = tl.load(origin + source[:, None] * WIDTH + column[None, :], mask=inside)
    tl.store(base + target[:, None] * WIDTH + column[None, :], moved, mask=inside)


@triton.jit
def _rope_back(keys, rope, HEAD_DIM: tl.constexpr):
    """Keys (n, DIMENSIONS) float32, each pair (i, i + HEAD_DIM/2) rotated back by the angles of `rope`.

    `rope` (HEAD_DIM,): cosines, then sines; a common magnitude factor cancels out.
    """
    HALF_DIM: tl.constexpr = HEAD_DIM // 2
    dimension = tl.arange(0, keys.shape[1])
    within = dimension < HEAD_DIM
    pair = tl.where(dimension < HALF_DIM, dimension, dimension - HALF_DIM)
    partner = tl.where(dimension < HALF_DIM, dimension + HALF_DIM, dimension - HALF_DIM)
    partner = tl.where(within, partner, dimension)
    cosine = tl.load(rope + pair, mask=within, other=1.0)
    sine = tl.load(rope + HALF_DIM + pair, mask=within, other=0.0)
    length = tl.sqrt(cosine * cosine + sine * sine)
    sine = tl.where(dimension < HALF_DIM, sine, -sine)
    others = tl.gather(keys, tl.broadcast_to(partner[None, :], keys.shape), 1)
    return keys * (cosine / length)[None, :] + others * (sine / length)[None, :]


@triton.jit(do_not_specialize=["first", "last", "dropped"])
def context_shift_kernel(
    origin,
    cache,
    table,
    first,
    last,
    dropped,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DIMENSIONS: tl.constexpr,
    ROWS: tl.constexpr,
    KEY_TYPE: tl.constexpr,
    VALUE_TYPE: tl.constexpr,
    ROPES: tl.constexpr,
    IS_RING: tl.constexpr,
):
    """Positions first… up to (not including) `last` of `cache` receive the entries `dropped` positions later
    of `origin`, the same cache or a copy; keys get RoPE of -`dropped` positions.

    Processes ROWS positions of one head. In one cache at most `dropped` positions are moved, so no position
    is both read and written. Row p of `table` has the cosines and sines of position p. Reads and writes the
    moved keys and values once.
    """
    head = tl.program_id(1)
    to = first + tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = to < last
    begin = first + tl.program_id(0) * ROWS
    capacity = cache.capacity
    source_row = ring_rows(to + dropped, begin + dropped, capacity, IS_RING)
    target = head.to(tl.int64) * capacity + ring_rows(to, begin, capacity, IS_RING)
    source = head.to(tl.int64) * capacity + source_row
    WIDTH: tl.constexpr = (HEAD_DIM + 7) // 8 if KEY_TYPE == Q4_0 else HEAD_DIM
    GROUPS: tl.constexpr = (HEAD_DIM + 31) // 32
    if ROPES:
        tile = load_cache_tile(
            origin.k, origin.k_scales, head, source_row, inside, capacity, HEAD_DIM, DIMENSIONS, KEY_TYPE
        ).to(tl.float32)
        if KEY_TYPE == Q4_0:
            tile = hadamard(tile, HEAD_DIM)
        tile = _rope_back(tile, table + dropped.to(tl.int64) * HEAD_DIM, HEAD_DIM)
        store_cache_rows(cache.k, cache.k_scales, target, inside, tile, HEAD_DIM, DIMENSIONS, KEY_TYPE)
    else:
        _move_rows(origin.k, cache.k, source, target, inside, WIDTH)
        if KEY_TYPE >= Q8_0:
            _move_rows(origin.k_scales, cache.k_scales, source, target, inside, GROUPS)
    VALUE_WIDTH: tl.constexpr = (VALUE_DIM + 7) // 8 if VALUE_TYPE == Q4_0 else VALUE_DIM
    _move_rows(origin.v, cache.v, source, target, inside, VALUE_WIDTH)
    if VALUE_TYPE >= Q8_0:
        _move_rows(origin.v_scales, cache.v_scales, source, target, inside, (VALUE_DIM + 31) // 32)


class ShiftedHeads(NamedTuple):
    """Elements of a key and of a value, and whether keys have RoPE."""

    key_dim: int
    value_dim: int
    has_rope: bool


def shift_context(
    cache: DeviceCache, table: torch.Tensor, heads: ShiftedHeads, keep: int, dropped: int, end: int
) -> None:
    """Evict `dropped` positions after the first `keep`; the later ones up to `end` move up.

    At most `dropped` positions move at a time, so none is overwritten before it has moved. Keys are
    dequantized, get RoPE and are quantized again; values move unchanged. `table`: the RoPE table of the
    layer. No memory is allocated.

    Of a ring all positions that it holds move at once, from a copy of one head: every row is both read and
    written.
    """
    if cache.is_ring:
        for index in range(len(cache.keys)):
            head = cache.head(index)
            first = max(keep, end - dropped - cache.positions)
            _move(head.copied(), head, table, heads, first, end - dropped, dropped)
        return
    for begin in range(keep, end - dropped, dropped):
        _move(cache, cache, table, heads, begin, min(begin + dropped, end - dropped), dropped)


def _move(
    origin: DeviceCache,
    cache: DeviceCache,
    table: torch.Tensor,
    heads: ShiftedHeads,
    first: int,
    last: int,
    dropped: int,
) -> None:
    """As `context_shift_kernel`."""
    dimensions, longest = head_dimensions(heads.key_dim), head_dimensions(max(heads[:2]))
    rows = max(TILE_ELEMENTS // longest, 1)
    context_shift_kernel[(-(-(last - first) // rows), len(cache.keys))](
        origin.args, cache.args, table, first, last, dropped,
        HEAD_DIM=heads.key_dim, VALUE_DIM=heads.value_dim, DIMENSIONS=dimensions, ROWS=rows,
        KEY_TYPE=CACHES[cache.keys.dtype], VALUE_TYPE=CACHES[cache.values.dtype],
        ROPES=heads.has_rope, IS_RING=cache.is_ring, num_warps=4,
    )  # fmt: skip
