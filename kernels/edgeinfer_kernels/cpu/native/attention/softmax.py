"""Softmax attention over the cache: online softmax on tiles of 64 positions, with `attention_states.py`.

Keys are in tiles of sixteen positions, dimension by dimension, so that a register holds sixteen positions and
no sum across lanes is needed; values are in rows. The code for 8-bit caches is in `softmax_q8_0.py`, for
4-bit caches in `softmax_q4_0.py`.
"""

from typing import Any, NamedTuple

import numpy as np

from edgeinfer_kernels.cpu.native.attention.attention_states import (
    DECAY,
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
    multiply_add,
    splat_f32,
    store_floats,
)
from edgeinfer_kernels.cpu.native.simd.four_vectors import (
    add_products,
    cap_scores,
    four_zeros,
    make_load_four,
    make_prefetch,
    scaled_four,
    store_four,
)
from edgeinfer_kernels.cpu.native.simd.scalars import has_wide_registers, load_f32, load_i64, store_i64
from edgeinfer_kernels.cpu.runtime.abi import POSITIONS_PER_TILE as TILE
from edgeinfer_kernels.cpu.runtime.abi import SCALED, SCORES_BYTES

LANES = 16
PAGES_PER_TILE = TILE // LANES
ALL_DIMENSIONS = 1 << 30
"""Larger than any head_dim."""


def make_score_tiles(load_four, row_bytes, dimensions, put, *, add=add_products, in_row=1):
    """Score functions for one query head, and for four that share their keys, over the 64 positions at
    `keys`; the next tile is `ahead` bytes further, for prefetch.

    A row has the elements of `in_row` dimensions for sixteen positions. `load_four(at, stride)` returns four
    rows, `add(query, row, total)` adds their products. Products are summed over `dimensions` at a time;
    `put(scores, sums, scales, begin, padded)` adds the sums from dimension `begin` on to 64 scores. `spare`:
    scratch memory, unused here.
    """
    prefetch_next = make_prefetch(4 * row_bytes)

    @device_function
    def score_one(query, keys, scales, spare, ahead, head_dim, padded, scale, soft_cap, scores):
        for begin in range(0, head_dim, dimensions):
            total = four_zeros()
            for d in range(begin, min(head_dim, begin + dimensions), in_row):
                prefetch_next(keys, d // in_row, ahead)
                key = load_four(keys + row_bytes * (d // in_row), row_bytes * (padded // in_row))
                total = add(query + 4 * d, key, total)
            put(scores, total, scales, begin, padded)
        cap_scores(scores, scale, soft_cap)

    @device_function
    def score_four(query, keys, scales, spare, ahead, head_dim, padded, scale, soft_cap, scores):
        for begin in range(0, head_dim, dimensions):
            t0 = four_zeros()
            t1 = four_zeros()
            t2 = four_zeros()
            t3 = four_zeros()
            for d in range(begin, min(head_dim, begin + dimensions), in_row):
                prefetch_next(keys, d // in_row, ahead)
                key = load_four(keys + row_bytes * (d // in_row), row_bytes * (padded // in_row))
                q = query + 4 * d
                t0 = add(q, key, t0)
                t1 = add(q + 4 * padded, key, t1)
                t2 = add(q + 8 * padded, key, t2)
                t3 = add(q + 12 * padded, key, t3)
            put(scores, t0, scales, begin, padded)
            put(scores + SCORES_BYTES, t1, scales, begin, padded)
            put(scores + 2 * SCORES_BYTES, t2, scales, begin, padded)
            put(scores + 3 * SCORES_BYTES, t3, scales, begin, padded)
        for head in range(4):
            cap_scores(scores + head * SCORES_BYTES, scale, soft_cap)

    return score_one, score_four


def make_row_loads(load_cached, element_bytes):
    """Row access for values whose elements have `element_bytes` bytes each: the bytes of a number of
    elements; loads of sixty-four and of sixteen elements of a row; bytes of sixty-four.
    """
    load_four_of = make_load_four(load_cached)

    @device_function
    def row_bytes(elements):
        return element_bytes * elements

    @device_function
    def load_four(row, d):
        return load_four_of(row + element_bytes * d, element_bytes * LANES)

    @device_function
    def load_one(row, d):
        return load_cached(row + element_bytes * d)

    return row_bytes, load_four, load_one, 4 * LANES * element_bytes


def make_add_values(rows, factors_of, add, pitch):
    """attn_out = attn_out·decay + Σ factor·value for one query head, and for four that share their values.

    The weights of successive heads are SCORES_BYTES apart, their states one state's bytes; the decay is at
    byte DECAY of the state. `factors_of(weights, scales, padded, d, heads, spare)`: address of the factors of
    elements from `d` on, with heads `pitch` bytes apart; `add(factor, values, total)` adds 64 elements.
    `rows`: the result of `make_row_loads`. A value has `padded` elements, the first of a row of `width`.
    """
    row_bytes, load_four, load_one, elements_bytes = rows
    prefetch_next = make_prefetch(elements_bytes)

    @device_function
    def add_one(weights, values, scales, spare, ahead, first, last, padded, width, state):
        decay = load_f32(state + DECAY)
        attn_out = state + STATE_BYTES
        whole = padded // 64 * 64
        for d in range(0, whole, 64):
            factors = factors_of(weights, scales, width, d, 1, spare)
            total = scaled_four(attn_out + 4 * d, decay)
            for i in range(first, last):
                row = values + row_bytes(width) * i
                prefetch_next(row + row_bytes(d), 0, ahead)
                total = add(factors + 4 * i, load_four(row, d), total)
            store_four(attn_out + 4 * d, total)
        for d in range(whole, padded, LANES):
            factors = factors_of(weights, scales, width, d, 1, spare)
            m = multiply(load_floats(attn_out + 4 * d), splat_f32(decay))
            for i in range(first, last):
                cached = load_one(values + row_bytes(width) * i, d)
                m = multiply_add(splat_f32(load_f32(factors + 4 * i)), cached, m)
            store_floats(attn_out + 4 * d, m)

    @device_function
    def add_four(weights, values, scales, spare, ahead, first, last, padded, width, state):
        """For padded head dimensions that are whole multiples of 64."""
        step = STATE_BYTES + 4 * padded
        for d in range(0, padded, 64):
            factors = factors_of(weights, scales, width, d, 4, spare)
            attn_out = state + STATE_BYTES + 4 * d
            t0 = scaled_four(attn_out, load_f32(state + DECAY))
            t1 = scaled_four(attn_out + step, load_f32(state + step + DECAY))
            t2 = scaled_four(attn_out + 2 * step, load_f32(state + 2 * step + DECAY))
            t3 = scaled_four(attn_out + 3 * step, load_f32(state + 3 * step + DECAY))
            for i in range(first, last):
                row = values + row_bytes(width) * i
                prefetch_next(row + row_bytes(d), 0, ahead)
                value = load_four(row, d)
                f = factors + 4 * i
                t0 = add(f, value, t0)
                t1 = add(f + pitch, value, t1)
                t2 = add(f + 2 * pitch, value, t2)
                t3 = add(f + 3 * pitch, value, t3)
            store_four(attn_out, t0)
            store_four(attn_out + step, t1)
            store_four(attn_out + 2 * step, t2)
            store_four(attn_out + 3 * step, t3)

    return add_one, add_four


@device_function
def put_sums(scores, sums, scales, begin, padded):
    """For elements without scales: the sums are the scores."""
    store_four(scores, sums)


@device_function
def weights_alone(weights, scales, padded, d, heads, spare):
    """For elements without scales: the weights are the factors."""
    return weights


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
    def gather(block, query, kv_head, begin, end, own, pages, states, scores, copied):
        """Add positions begin..end to the states of the query heads, of the token at position `own`, that
        share `kv_head`.

        Reads each key and value of the range once, for any number of heads that share them. `pages`: 0, or
        the address of the page of each sixteen positions. A tile whose pages are not contiguous (also one at
        the end of a ring) is copied to `copied` first, so its sums are bit-identical.
        """
        key_kind, value_kind = block.key_kind, block.value_kind
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
        first_page = block.context // LANES * kv_head
        ring = block.ring // LANES
        key_cache = block.key_cache + key_page * first_page
        value_cache = block.value_cache + value_page * first_page
        key_scale_cache = block.key_scales + key_scale_bytes * first_page
        value_scale_cache = block.value_scales + scale_bytes * first_page
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
                    key_kind,
                    q,
                    keys,
                    key_scales,
                    spare,
                    keys_ahead,
                    head_dim,
                    padded,
                    scale,
                    soft_cap,
                    scores,
                )
                for head in range(4):
                    add_alibi(block, group * kv_head + g + head, tile - own, scores + head * SCORES_BYTES)
                    weigh_scores(state + head * step, scores + head * SCORES_BYTES, first, last)
                add_four(
                    value_kind, scores, values, value_scales, spare, values_ahead, first, last, value, width,
                    state,
                )  # fmt: skip
            for g in range(together, group):
                q, state = query + 4 * padded * g, states + g * step
                score_one(
                    key_kind,
                    q,
                    keys,
                    key_scales,
                    spare,
                    keys_ahead,
                    head_dim,
                    padded,
                    scale,
                    soft_cap,
                    scores,
                )
                add_alibi(block, group * kv_head + g, tile - own, scores)
                weigh_scores(state, scores, first, last)
                add_one(
                    value_kind, scores, values, value_scales, spare, values_ahead, first, last, value, width,
                    state,
                )  # fmt: skip

    return gather


def make_plain_elements(load_cached, element_bytes):
    """For elements without scales."""
    rows = make_row_loads(load_cached, element_bytes)
    row = element_bytes * LANES
    scores_of = make_score_tiles(make_load_four(load_cached), row, ALL_DIMENSIONS, put_sums)
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
