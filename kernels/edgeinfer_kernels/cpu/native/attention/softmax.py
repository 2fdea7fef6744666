"""Softmax attention over the cache: online softmax on tiles of 64 positions, with `attention_states.py`.

The functions for an element type are made of those in `softmax_tiles.py`.
"""

from typing import Any, NamedTuple

import numpy as np

from edgeinfer_kernels.cpu.native.attention.attention_states import (
    STATE_BYTES,
    add_alibi,
    weigh_scores,
)
from edgeinfer_kernels.cpu.native.attention.cache_writing import in_ring
from edgeinfer_kernels.cpu.native.attention.softmax_q4_0 import (
    add_pairs,
    load_pairs,
    pairs_bytes,
    rows_of_nibbles,
)
from edgeinfer_kernels.cpu.native.attention.softmax_q8_0 import (
    add_scaled_sums,
    add_two_groups,
    load_codes,
    scale_page,
    scaled_weights,
)
from edgeinfer_kernels.cpu.native.attention.softmax_tiles import (
    ALL_DIMENSIONS,
    make_add_values,
    make_row_loads,
    make_score_tiles,
    put_sums,
    weights_alone,
)
from edgeinfer_kernels.cpu.native.simd.byte_lanes import (
    and_i32,
    load_unsigned_bytes,
    or_i32,
    shift_left,
)
from edgeinfer_kernels.cpu.native.simd.exports import device_function
from edgeinfer_kernels.cpu.native.simd.float_lanes import (
    f16_of_bits,
    load_f16,
    load_floats,
    multiply,
    splat_f32,
)
from edgeinfer_kernels.cpu.native.simd.four_vectors import (
    add_products,
    make_load_four,
    make_load_two,
)
from edgeinfer_kernels.cpu.native.simd.scalars import has_wide_registers, load_i64, store_i64
from edgeinfer_kernels.cpu.runtime.abi import POSITIONS_PER_TILE as TILE
from edgeinfer_kernels.cpu.runtime.abi import SCALED, SCORES_BYTES

LANES = 16
PAGES_PER_TILE = TILE // LANES


@device_function
def page_at(pages, index, ring):
    """The cache page of a sequence's page `index`, in a cache that starts again after `ring` pages; `pages`:
    see `gather`.
    """
    return in_ring(load_i64(pages + 8 * index) if pages != 0 else index, ring)


@device_function
def first_of_neighbours(pages, index, count, ring):
    """The cache page of a sequence's page `index` if `count` pages from there on are contiguous in the cache,
    else -1.
    """
    first = page_at(pages, index, ring)
    if pages != 0:
        for i in range(1, count):
            if page_at(pages, index + i, ring) != first + i:
                return -1
    return first if first + count <= ring else -1


@device_function
def copy_words(source, target, nbytes):
    """Copy whole words of eight bytes."""
    for offset in range(0, nbytes, 8):
        store_i64(target + offset, load_i64(source + offset))


@device_function
def copy_pages(pages, index, count, ring, source, target, nbytes):
    """Copy `count` pages of `nbytes` from anywhere in the cache to contiguous memory."""
    for i in range(count):
        copy_words(source + nbytes * page_at(pages, index + i, ring), target + nbytes * i, nbytes)


class CacheElements(NamedTuple):
    """The functions for one element type of a cache: bytes of a head's key and value by padded head_dim, and
    the results of `make_score_tiles` and `make_add_values`.
    """

    key_bytes: Any
    value_bytes: Any
    scores_of: tuple[Any, Any]
    values_of: tuple[Any, Any]


def make_choice(functions):
    """A function that calls the one of its first argument, a value of CACHE_KINDS."""
    of_f32, of_f16, of_q8_0, of_q4_0, of_fp8 = functions

    @device_function
    def chosen(kind, *args):
        if kind == 1:
            return of_f16(*args)
        if kind == 2:
            return of_q8_0(*args)
        if kind == 3:
            return of_q4_0(*args)
        if kind == 4:
            return of_fp8(*args)
        return of_f32(*args)

    return chosen


@device_function
def scale_bytes_of(kind, padded):
    """Bytes of a page's scales, for elements of this kind."""
    return scale_page(padded) if kind == 2 or kind == 3 else 0


def make_gather(kinds):
    """The attention function over a range of positions. `kinds`: `CacheElements` in the order of CACHE_KINDS;
    SCALED elements of a head share a float16 scale; those of sixteen positions are contiguous.
    """
    key_bytes = make_choice([kind.key_bytes for kind in kinds])
    value_bytes = make_choice([kind.value_bytes for kind in kinds])
    score_one, score_four = (make_choice([kind.scores_of[i] for kind in kinds]) for i in range(2))
    add_one, add_four = (make_choice([kind.values_of[i] for kind in kinds]) for i in range(2))

    @device_function
    def gather(block, cache, query, kv_head, begin, end, own, pages, states, scores, copied):
        """Add positions begin..end of a cache to the states of the query heads, of the token at position
        `own`, that share `kv_head`.

        Reads each key and value of the range once, for any number of heads that share them. `pages`: 0, or
        the address of the page of each sixteen positions. A tile whose pages are not contiguous (also one at
        the end of a ring) is copied to `copied` first, so its sums are bit-identical.
        """
        key_kind, value_kind = cache.key_kind, cache.value_kind
        padded, value = block.padded_head, block.padded_value
        head_dim, width = block.head_dim, block.row_width
        group = block.heads // block.kv_heads
        scale = block.scale
        soft_cap = block.soft_cap
        step = STATE_BYTES + 4 * value
        # Four heads at once need 32 registers of 64 bytes.
        together = group // 4 * 4 if has_wide_registers() != 0 and value % 64 == 0 else 0
        key_page, value_page = LANES * key_bytes(key_kind, padded), LANES * value_bytes(value_kind, width)
        key_scale_bytes, scale_bytes = scale_bytes_of(key_kind, padded), scale_bytes_of(value_kind, width)
        first_page = cache.context // LANES * kv_head
        ring = cache.ring // LANES
        key_cache = cache.key_cache + key_page * first_page
        value_cache = cache.value_cache + value_page * first_page
        key_scale_cache = cache.key_scales + key_scale_bytes * first_page
        value_scale_cache = cache.value_scales + scale_bytes * first_page
        keys_ahead = PAGES_PER_TILE * key_page
        values_ahead = PAGES_PER_TILE * value_page
        scales_ahead = PAGES_PER_TILE * key_scale_bytes
        spare = copied + keys_ahead + values_ahead + scales_ahead + PAGES_PER_TILE * scale_bytes
        for tile in range(begin // LANES * LANES, end, TILE):
            first = max(0, begin - tile)
            last = min(TILE, end - tile)
            index = tile // LANES
            count = (last + LANES - 1) // LANES
            page = first_of_neighbours(pages, index, count, ring)
            keys = key_cache + key_page * page
            values = value_cache + value_page * page
            key_scales = key_scale_cache + key_scale_bytes * page
            value_scales = value_scale_cache + scale_bytes * page
            is_last = tile + TILE >= end
            next_keys, next_values = (0, 0) if is_last else (keys_ahead, values_ahead)
            if page < 0:
                keys, values = copied, copied + keys_ahead
                key_scales = values + values_ahead
                value_scales = key_scales + scales_ahead
                copy_pages(pages, index, count, ring, key_cache, keys, key_page)
                copy_pages(pages, index, count, ring, value_cache, values, value_page)
                copy_pages(pages, index, count, ring, key_scale_cache, key_scales, key_scale_bytes)
                copy_pages(pages, index, count, ring, value_scale_cache, value_scales, scale_bytes)
            for g in range(0, together, 4):
                q, state = query + 4 * padded * g, states + g * step
                score_four(
                    key_kind, q, keys, key_scales, spare, next_keys, head_dim, padded, scale, soft_cap,
                    last, scores,
                )  # fmt: skip
                for head in range(4):
                    add_alibi(block, group * kv_head + g + head, tile - own, scores + head * SCORES_BYTES)
                weigh_scores(state, step, 4, scores, first, last)
                add_four(
                    value_kind, scores, values, value_scales, spare, next_values, first, last, value, width,
                    state,
                )  # fmt: skip
            for g in range(together, group):
                q, state = query + 4 * padded * g, states + g * step
                score_one(
                    key_kind, q, keys, key_scales, spare, next_keys, head_dim, padded, scale, soft_cap,
                    last, scores,
                )  # fmt: skip
                add_alibi(block, group * kv_head + g, tile - own, scores)
                weigh_scores(state, step, 1, scores, first, last)
                add_one(
                    value_kind, scores, values, value_scales, spare, next_values, first, last, value, width,
                    state,
                )  # fmt: skip

    return gather


def make_plain_elements(load_cached, element_bytes):
    """For elements without scales."""
    rows = make_row_loads(load_cached, element_bytes)
    row = element_bytes * LANES
    load_two = make_load_two(load_cached)
    scores_of = make_score_tiles(
        make_load_four(load_cached), row, ALL_DIMENSIONS, put_sums, load_two=load_two
    )
    values_of = make_add_values(rows, weights_alone, add_products, SCORES_BYTES)
    return CacheElements(rows[0], rows[0], scores_of, values_of)


def make_scaled_elements(scores_of, key_bytes, value_rows):
    """For elements with scales."""
    values_of = make_add_values(value_rows, scaled_weights, add_two_groups, 2 * SCORES_BYTES)
    return CacheElements(key_bytes, value_rows[0], scores_of, values_of)


@device_function
def load_fp8(at):
    """Sixteen FP8 elements as float32, as `cache_formats.from_fp8`."""
    codes = load_unsigned_bytes(at)
    bits = or_i32(shift_left(and_i32(codes, 0x80), 8), shift_left(and_i32(codes, 0x7F), 7))
    return multiply(f16_of_bits(bits), splat_f32(np.float32(256)))  # float16 has 8 more in its bias


rows_of_bytes = make_row_loads(load_codes, 1)
gather = make_gather(
    (
        make_plain_elements(load_floats, 4),
        make_plain_elements(load_f16, 2),
        make_scaled_elements(
            make_score_tiles(make_load_four(load_codes), LANES, SCALED, add_scaled_sums),
            rows_of_bytes[0],
            rows_of_bytes,
        ),
        make_scaled_elements(
            make_score_tiles(load_pairs, LANES, SCALED, add_scaled_sums, add=add_pairs, in_row=2),
            pairs_bytes,
            rows_of_nibbles,
        ),
        make_plain_elements(load_fp8, 1),
    )
)
