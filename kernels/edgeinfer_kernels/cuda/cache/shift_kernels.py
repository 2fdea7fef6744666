"""Context shift of a layer's cache on the device: evicts positions in its middle; see `context_shift`."""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from edgeinfer_kernels.cuda.triton_ops.cache_tiles import (
    CACHES,
    F16,
    Q4_0,
    hadamard,
    load_cache_tile,
    store_cache_rows,
)
from edgeinfer_kernels.cuda.weights.device_block import DeviceCache
from edgeinfer_kernels.sizes.cuda_matrices import head_dimensions

TILE_ELEMENTS = 2048
"""Elements of keys that a program processes."""


@triton.jit
def _move_rows(base, source, target, mask, WIDTH: tl.constexpr):
    """Copy rows (n,) int64 of WIDTH elements to others, bit by bit."""
    column = tl.arange(0, triton.next_power_of_2(WIDTH))
    inside = mask[:, None] & (column < WIDTH)[None, :]
    moved = tl.load(base + source[:, None] * WIDTH + column[None, :], mask=inside)
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
    keys,
    key_scales,
    values,
    value_scales,
    table,
    first,
    last,
    dropped,
    positions,
    HEAD_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    DIMENSIONS: tl.constexpr,
    ROWS: tl.constexpr,
    CACHE: tl.constexpr,
    ROPES: tl.constexpr,
):
    """Positions first… up to (not including) `last` receive the entries `dropped` positions later; keys get
    RoPE of -`dropped` positions.

    Processes ROWS positions of one head. At most `dropped` positions are moved, so no position is both read
    and written. Row p of `table` has the cosines and sines of position p. Reads and writes the moved keys and
    values once.
    """
    head = tl.program_id(1)
    to = first + tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = to < last
    target = head.to(tl.int64) * positions + to
    source = target + dropped
    WIDTH: tl.constexpr = (HEAD_DIM + 7) // 8 if CACHE == Q4_0 else HEAD_DIM
    GROUPS: tl.constexpr = (HEAD_DIM + 31) // 32
    if ROPES:
        tile = load_cache_tile(
            keys, key_scales, head, to + dropped, inside, positions, HEAD_DIM, DIMENSIONS, CACHE
        ).to(tl.float32)
        if CACHE == Q4_0:
            tile = hadamard(tile, HEAD_DIM)
        tile = _rope_back(tile, table + dropped.to(tl.int64) * HEAD_DIM, HEAD_DIM)
        store_cache_rows(keys, key_scales, target, inside, tile, HEAD_DIM, DIMENSIONS, CACHE)
    else:
        _move_rows(keys, source, target, inside, WIDTH)
        if CACHE != F16:
            _move_rows(key_scales, source, target, inside, GROUPS)
    VALUE_WIDTH: tl.constexpr = (VALUE_DIM + 7) // 8 if CACHE == Q4_0 else VALUE_DIM
    _move_rows(values, source, target, inside, VALUE_WIDTH)
    if CACHE != F16:
        _move_rows(value_scales, source, target, inside, (VALUE_DIM + 31) // 32)


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
    """
    dimensions, longest = head_dimensions(heads.key_dim), head_dimensions(max(heads[:2]))
    rows = max(TILE_ELEMENTS // longest, 1)
    for begin in range(keep, end - dropped, dropped):
        last = min(begin + dropped, end - dropped)
        context_shift_kernel[(-(-(last - begin) // rows), len(cache.keys))](
            cache.keys, cache.key_scales, cache.values, cache.value_scales, table, begin, last, dropped,
            cache.keys.shape[1],
            HEAD_DIM=heads.key_dim, VALUE_DIM=heads.value_dim, DIMENSIONS=dimensions, ROWS=rows,
            CACHE=CACHES[cache.keys.dtype], ROPES=heads.has_rope, num_warps=4,
        )  # fmt: skip
