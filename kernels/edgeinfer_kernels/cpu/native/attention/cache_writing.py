"""Writes keys and values to the KV cache, as floats or quantized to 8 or 4 bits."""

import numpy as np

from edgeinfer_kernels.cpu.native.attention.softmax_q4_0 import GROUP_BYTES, groups_bytes
from edgeinfer_kernels.cpu.native.simd.byte_lanes import (
    add_i32,
    and_i32,
    float_bits,
    maximum_i32,
    minimum_i32,
    or_i32,
    shift_left,
    shift_right,
    splat_i32,
    store_as_bytes,
)
from edgeinfer_kernels.cpu.native.simd.exports import device_function
from edgeinfer_kernels.cpu.native.simd.float_lanes import (
    absolute,
    first_lane,
    lanes_max,
    lanes_max_magnitude,
    larger_magnitude,
    load_f16,
    load_floats,
    maximum,
    minimum,
    multiply,
    nearest_int,
    scatter_f16,
    splat_f32,
    store_f16,
    store_floats,
)
from edgeinfer_kernels.cpu.native.simd.scalars import (
    load_f32,
    load_i64,
    load_u8,
    load_u16,
    store_f32,
    store_i8,
    store_i16,
)
from edgeinfer_kernels.cpu.runtime.abi import POSITIONS_PER_PAGE, RECENT_PAGES, SCALED

LANES = 16


@device_function
def store_key(block, cache_args, kv_head, position, row, spare):
    """Store a key: its element d is adjacent to element d of the fifteen other positions of its tile."""
    padded = block.padded_head
    tile = kv_head * (cache_args.context // LANES) + position // LANES
    element = tile * padded * LANES + position % LANES
    cache = cache_args.key_cache
    kind = cache_args.key_kind
    if kind == 3:
        scales = cache_args.key_scales + scale_offset(tile, padded, position)
        cache += tile * padded // 2 * LANES + position % LANES
        for group in range((padded + SCALED - 1) // SCALED):
            inverse = store_nibble_scale(row, group, padded, scales + 2 * LANES * group, spare)
            for d in range(SCALED * group, min(padded, SCALED * (group + 1)), LANES):
                store_as_bytes(spare, nearest_nibble(row + 4 * d, inverse))
                for i in range(0, LANES, 2):
                    pair = load_u8(spare + i) | load_u8(spare + i + 1) << 4
                    store_i8(cache + LANES * ((d + i) // 2), pair)
    elif kind == 2:
        scales = cache_args.key_scales + scale_offset(tile, padded, position)
        for group in range((padded + SCALED - 1) // SCALED):
            inverse = store_scale(row, group, padded, scales + 2 * LANES * group, spare)
            for d in range(SCALED * group, min(padded, SCALED * (group + 1)), LANES):
                store_as_bytes(spare, nearest_code(row + 4 * d, inverse))
                for i in range(LANES):
                    store_i8(cache + element + LANES * (d + i), load_u8(spare + i))
    elif kind == 4:
        for d in range(0, padded, LANES):
            store_as_bytes(spare, to_fp8(load_floats(row + 4 * d)))
            for i in range(LANES):
                store_i8(cache + element + LANES * (d + i), load_u8(spare + i))
    elif kind == 1:
        for d in range(0, padded, LANES):
            scatter_f16(cache + 2 * (element + LANES * d), load_floats(row + 4 * d))
    else:
        for d in range(padded):
            store_f32(cache + 4 * (element + LANES * d), load_f32(row + 4 * d))


@device_function
def store_value(block, cache_args, kv_head, position, row, spare):
    """Store a value as a padded row."""
    padded = block.row_width
    context = cache_args.context
    element = (kv_head * context + position) * padded
    cache = cache_args.value_cache
    kind = cache_args.value_kind
    if kind == 3:
        tile = kv_head * (context // LANES) + position // LANES
        scales = cache_args.value_scales + scale_offset(tile, padded, position)
        cache += (kv_head * context + position) * groups_bytes(padded)
        for group in range((padded + SCALED - 1) // SCALED):
            inverse = store_nibble_scale(row, group, padded, scales + 2 * LANES * group, spare)
            codes = nearest_nibble(row + 4 * SCALED * group, inverse)
            half = SCALED * group + LANES
            upper = nearest_nibble(row + 4 * half, inverse) if half < padded else splat_i32(8)
            store_as_bytes(cache + GROUP_BYTES * group, or_i32(codes, shift_left(upper, 4)))
    elif kind == 2:
        tile = kv_head * (context // LANES) + position // LANES
        scales = cache_args.value_scales + scale_offset(tile, padded, position)
        for group in range((padded + SCALED - 1) // SCALED):
            inverse = store_scale(row, group, padded, scales + 2 * LANES * group, spare)
            for d in range(SCALED * group, min(padded, SCALED * (group + 1)), LANES):
                store_as_bytes(cache + element + d, nearest_code(row + 4 * d, inverse))
    elif kind == 4:
        for i in range(0, padded, LANES):
            store_as_bytes(cache + element + i, to_fp8(load_floats(row + 4 * i)))
    elif kind == 1:
        for i in range(0, padded, LANES):
            store_f16(cache + 2 * (element + i), load_floats(row + 4 * i))
    else:
        for i in range(0, padded, LANES):
            store_floats(cache + 4 * (element + i), load_floats(row + 4 * i))


@device_function
def to_fp8(x):
    """Sixteen elements as FP8, as `cache_formats.to_fp8`."""
    magnitude = minimum(absolute(x), splat_f32(np.float32(448)))
    bits = float_bits(magnitude)
    raised = add_i32(add_i32(bits, and_i32(shift_right(bits, 20), 1)), splat_i32(0x7FFFF))
    normal = add_i32(shift_right(raised, 20), splat_i32(-120 << 3))
    steps = nearest_int(multiply(magnitude, splat_f32(np.float32(512))))  # the code of a number below 2⁻⁵
    code = minimum_i32(steps, maximum_i32(normal, splat_i32(8)))
    return or_i32(code, and_i32(shift_right(float_bits(x), 24), 0x80))


@device_function
def scale_offset(tile, padded, position):
    """Offset of the scales of a position in a tile; the scales of successive groups are 32 bytes apart."""
    return 2 * (tile * ((padded + SCALED - 1) // SCALED) * LANES + position % LANES)


@device_function
def store_scale(row, group, padded, target, spare):
    """Store the float16 scale of one group of a head's elements; return the factor for these elements."""
    largest = splat_f32(np.float32(0))
    for d in range(SCALED * group, min(padded, SCALED * (group + 1)), LANES):
        largest = larger_magnitude(largest, load_floats(row + 4 * d))
    return store_one_f16(clamp_to_f16(lanes_max_magnitude(largest) / np.float32(127)), target, spare)


@device_function
def clamp_to_f16(scale):
    """The scale clamped to the largest float16; NaN stays NaN."""
    return np.float32(65504) if scale > np.float32(65504) else scale


@device_function
def store_one_f16(scale, target, spare):
    """Store a float16; return the inverse of the stored value, 0 for 0."""
    store_f16(spare, splat_f32(scale))
    store_i16(target, load_u16(spare))
    rounded = first_lane(load_f16(spare))
    return np.float32(1) / rounded if rounded != np.float32(0) else np.float32(0)


@device_function
def store_nibble_scale(row, group, padded, target, spare):
    """As `store_scale`, for codes in which the element of largest magnitude is -8."""
    highest = splat_f32(np.float32(0))
    lowest = splat_f32(np.float32(0))
    largest = splat_f32(np.float32(0))
    for d in range(SCALED * group, min(padded, SCALED * (group + 1)), LANES):
        highest = maximum(highest, load_floats(row + 4 * d))
        lowest = minimum(lowest, load_floats(row + 4 * d))
        largest = larger_magnitude(largest, load_floats(row + 4 * d))
    above, below = lanes_max(highest), lanes_max(absolute(lowest))
    scale = clamp_to_f16(lanes_max_magnitude(largest) / np.float32(8))
    return store_one_f16(-scale if above > below else scale, target, spare)


@device_function
def nearest_nibble(row, inverse):
    """Sixteen elements times `inverse`, rounded to the nearest integer from -8 to 7, plus 8."""
    scaled = multiply(load_floats(row), splat_f32(inverse))
    held = minimum(maximum(scaled, splat_f32(np.float32(-8))), splat_f32(np.float32(7)))
    return add_i32(nearest_int(held), splat_i32(8))


@device_function
def nearest_code(row, inverse):
    """Sixteen elements times `inverse`, rounded to the nearest integer, at most 127."""
    scaled = multiply(load_floats(row), splat_f32(inverse))
    return nearest_int(minimum(maximum(scaled, splat_f32(np.float32(-127))), splat_f32(np.float32(127))))


@device_function
def token_args_of(step_args, token):
    """A token's arguments; address 0 if there are none."""
    token_args = step_args.token_args
    return token_args[token] if token_args.address != 0 else token_args


@device_function
def position_of(step_args, token):
    """Position of a token in its sequence."""
    token_args = token_args_of(step_args, token)
    return token_args.position if token_args.address != 0 else step_args.start + token


@device_function
def last_position(step_args):
    """The largest position of all tokens."""
    tokens = step_args.tokens
    last = position_of(step_args, 0)
    for token in range(1, tokens if step_args.token_args.address != 0 else 1):
        last = max(last, position_of(step_args, token))
    return last if step_args.token_args.address != 0 else last + tokens - 1


@device_function
def in_ring(index, ring):
    """index % ring; most caches are longer than any index."""
    return index if index < ring else index % ring


@device_function
def slot_of(token_args, position, ring):
    """Cache slot of the key and value of a position."""
    if token_args.address == 0:
        return in_ring(position, ring)
    page = load_i64(token_args.pages + 8 * (position // POSITIONS_PER_PAGE))
    return in_ring(page * POSITIONS_PER_PAGE + position % POSITIONS_PER_PAGE, ring)


@device_function
def recent_pages_of(block, step_args, token_args):
    """The address of a token's pages of recent positions; 0: there are none."""
    if block.recent.address == 0:
        return 0
    return token_args.recent if token_args.address != 0 else step_args.recent


@device_function
def first_recent(position):
    """The first position that the token at this position reads in f16."""
    return max(0, position // POSITIONS_PER_PAGE - (RECENT_PAGES - 1)) * POSITIONS_PER_PAGE


def make_store_all(store):
    @device_function
    def store_all(block, kv_head, step_args, token_args, position, row, spare):
        """Store a key or a value in its slot, in the slots of its copies, and with the recent positions."""
        cache = block.cache
        ring = cache.ring
        store(block, cache, kv_head, slot_of(token_args, position, ring), row, spare)
        copy = token_args.copies if token_args.address != 0 else 0
        while copy != 0 and load_i64(copy) >= 0:
            store(block, cache, kv_head, in_ring(load_i64(copy), ring), row, spare)
            copy += 8
        recent = recent_pages_of(block, step_args, token_args)
        if recent != 0:
            page = load_i64(recent + 8 * (position // POSITIONS_PER_PAGE))
            slot = page * POSITIONS_PER_PAGE + position % POSITIONS_PER_PAGE
            store(block, block.recent, kv_head, slot, row, spare)

    return store_all


store_all_keys = make_store_all(store_key)
store_all_values = make_store_all(store_value)
