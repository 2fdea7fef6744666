"""A layer's cache on the device without some positions in its middle; see `cache_sliding`."""

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
from edgeinfer_kernels.cuda.weights.device_layers import DeviceCache
from edgeinfer_kernels.sizes.cuda_buffers import head_dimensions
from edgeinfer_kernels.specification import AttentionSpecification

TILE_ELEMENTS = 2048
"""Of keys that a program turns."""


@triton.jit
def _move_rows(base, source, target, mask, WIDTH: tl.constexpr):
    """Rows (n,) int64 of WIDTH elements to others, to the bit."""
    column = tl.arange(0, triton.next_power_of_2(WIDTH))
    inside = mask[:, None] & (column < WIDTH)[None, :]
    moved = tl.load(base + source[:, None] * WIDTH + column[None, :], mask=inside)
    tl.store(base + target[:, None] * WIDTH + column[None, :], moved, mask=inside)


@triton.jit
def _turned_back(keys, turn, HEAD_DIM: tl.constexpr):
    """Keys (n, DIMENSIONS) float32, each pair (i, i + HEAD_DIM/2) turned back by the angles of `turn`.

    `turn` (HEAD_DIM,): cosines, then sines; how long these vectors are makes no difference.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    dimension = tl.arange(0, keys.shape[1])
    within = dimension < HEAD_DIM
    pair = tl.where(dimension < HALF, dimension, dimension - HALF)
    partner = tl.where(dimension < HALF, dimension + HALF, dimension - HALF)
    partner = tl.where(within, partner, dimension)
    cosine = tl.load(turn + pair, mask=within, other=1.0)
    sine = tl.load(turn + HALF + pair, mask=within, other=0.0)
    length = tl.sqrt(cosine * cosine + sine * sine)
    sine = tl.where(dimension < HALF, sine, -sine)
    others = tl.gather(keys, tl.broadcast_to(partner[None, :], keys.shape), 1)
    return keys * (cosine / length)[None, :] + others * (sine / length)[None, :]


@triton.jit(do_not_specialize=["first", "last", "dropped"])
def slide_kernel(
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
    DIMENSIONS: tl.constexpr,
    ROWS: tl.constexpr,
    CACHE: tl.constexpr,
    TURNS: tl.constexpr,
):
    """Positions first… below `last` become what lies `dropped` behind them, keys turned back by so many.

    Of ROWS positions of one head. There are `dropped` of them at most: none is read and written. Row p of
    `table` has the cosines and sines of position p. Reads and writes the moved keys and values once.
    """
    head = tl.program_id(1)
    to = first + tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = to < last
    target = head.to(tl.int64) * positions + to
    source = target + dropped
    WIDTH: tl.constexpr = (HEAD_DIM + 7) // 8 if CACHE == Q4_0 else HEAD_DIM
    GROUPS: tl.constexpr = (HEAD_DIM + 31) // 32
    if TURNS:
        tile = load_cache_tile(
            keys, key_scales, head, to + dropped, inside, positions, HEAD_DIM, DIMENSIONS, CACHE
        ).to(tl.float32)
        if CACHE == Q4_0:
            tile = hadamard(tile, HEAD_DIM)
        tile = _turned_back(tile, table + dropped.to(tl.int64) * HEAD_DIM, HEAD_DIM)
        store_cache_rows(keys, key_scales, target, inside, tile, HEAD_DIM, DIMENSIONS, CACHE)
    else:
        _move_rows(keys, source, target, inside, WIDTH)
        if CACHE != F16:
            _move_rows(key_scales, source, target, inside, GROUPS)
    _move_rows(values, source, target, inside, WIDTH)
    if CACHE != F16:
        _move_rows(value_scales, source, target, inside, GROUPS)


def slide(
    cache: DeviceCache, table: torch.Tensor, facts: AttentionSpecification, keep: int, dropped: int, end: int
) -> None:
    """Forget `dropped` positions behind the first `keep`; those up to `end` move to where these lay.

    As many at a time as were dropped, so that none is overwritten before it has moved. Keys are widened,
    turned and rounded once more; values move as they are. `table`: RoPE's of the layer. No memory is taken.
    """
    dimensions = head_dimensions(facts.head_dim)
    rows = max(TILE_ELEMENTS // dimensions, 1)
    for begin in range(keep, end - dropped, dropped):
        last = min(begin + dropped, end - dropped)
        slide_kernel[(-(-(last - begin) // rows), facts.kv_heads)](
            cache.keys, cache.key_scales, cache.values, cache.value_scales, table, begin, last, dropped,
            cache.keys.shape[1],
            HEAD_DIM=facts.head_dim, DIMENSIONS=dimensions, ROWS=rows, CACHE=CACHES[cache.keys.dtype],
            TURNS=facts.rope is not None, num_warps=4,
        )  # fmt: skip
