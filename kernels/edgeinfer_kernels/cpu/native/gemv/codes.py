"""Codes of 32 columns of sixteen interleaved rows as bytes, from the bits in which formats store them."""

from edgeinfer_kernels.cpu.native.simd.byte_lanes import (
    bits_of_bytes,
    load_bytes,
    or_bytes,
    shift_bytes_left,
    shift_bytes_right,
    shift_right,
    spread_four_bits,
)
from edgeinfer_kernels.cpu.native.simd.exports import device_function, inline_function


@device_function
def nibbles(quants):
    """16 bytes per row: columns 0..15 in the low nibbles, 16..31 in the high nibbles."""
    x0 = load_bytes(quants)
    x1 = load_bytes(quants + 64)
    x2 = load_bytes(quants + 128)
    x3 = load_bytes(quants + 192)
    return (
        bits_of_bytes(x0, 0, 15),
        bits_of_bytes(x1, 0, 15),
        bits_of_bytes(x2, 0, 15),
        bits_of_bytes(x3, 0, 15),
        bits_of_bytes(x0, 4, 15),
        bits_of_bytes(x1, 4, 15),
        bits_of_bytes(x2, 4, 15),
        bits_of_bytes(x3, 4, 15),
    )


@device_function
def fields(quants, shift, mask):
    """32 bytes per row, one per column: its bits at `shift`."""
    return (
        bits_of_bytes(load_bytes(quants), shift, mask),
        bits_of_bytes(load_bytes(quants + 64), shift, mask),
        bits_of_bytes(load_bytes(quants + 128), shift, mask),
        bits_of_bytes(load_bytes(quants + 192), shift, mask),
        bits_of_bytes(load_bytes(quants + 256), shift, mask),
        bits_of_bytes(load_bytes(quants + 320), shift, mask),
        bits_of_bytes(load_bytes(quants + 384), shift, mask),
        bits_of_bytes(load_bytes(quants + 448), shift, mask),
    )


@device_function
def fields_with_high_bits(quants, shift, mask, high, high_shift, high_mask, bit):
    """As `fields`, with more bits of each column from `high`, stored at bit `bit`."""
    w = fields(quants, shift, mask)
    h = fields(high, high_shift, high_mask)
    return (
        or_bytes(w[0], shift_bytes_left(h[0], bit)),
        or_bytes(w[1], shift_bytes_left(h[1], bit)),
        or_bytes(w[2], shift_bytes_left(h[2], bit)),
        or_bytes(w[3], shift_bytes_left(h[3], bit)),
        or_bytes(w[4], shift_bytes_left(h[4], bit)),
        or_bytes(w[5], shift_bytes_left(h[5], bit)),
        or_bytes(w[6], shift_bytes_left(h[6], bit)),
        or_bytes(w[7], shift_bytes_left(h[7], bit)),
    )


@device_function
def fifth_bit(weights, high, index):
    """Set bit 4 of four columns from bits 4·index… of the row's word `high`."""
    return or_bytes(weights, shift_bytes_left(spread_four_bits(shift_right(high, 4 * index)), 4))


@device_function
def nibbles_with_fifth_bits(quants, high):
    w = nibbles(quants)
    return (
        fifth_bit(w[0], high, 0),
        fifth_bit(w[1], high, 1),
        fifth_bit(w[2], high, 2),
        fifth_bit(w[3], high, 3),
        fifth_bit(w[4], high, 4),
        fifth_bit(w[5], high, 5),
        fifth_bit(w[6], high, 6),
        fifth_bit(w[7], high, 7),
    )


@device_function
def of_top_bits(first, second, third):
    """Four columns, of which each of the three has two bits above its own; the lowest in `first`."""
    low = shift_bytes_right(bits_of_bytes(load_bytes(first), 0, 192), 2)
    middle = shift_bytes_right(or_bytes(low, bits_of_bytes(load_bytes(second), 0, 192)), 2)
    return shift_bytes_right(or_bytes(middle, bits_of_bytes(load_bytes(third), 0, 192)), 2)


@inline_function
def six_bit_codes(first, second, third, quarter):
    """32 columns of a quarter of 128; three quarters have 32 bytes per row each, see `pack_six_bits`."""
    if quarter == 0:
        return fields(first, 0, 63)
    if quarter == 1:
        return fields(second, 0, 63)
    if quarter == 2:
        return fields(third, 0, 63)
    return (
        of_top_bits(first, second, third),
        of_top_bits(first + 64, second + 64, third + 64),
        of_top_bits(first + 128, second + 128, third + 128),
        of_top_bits(first + 192, second + 192, third + 192),
        of_top_bits(first + 256, second + 256, third + 256),
        of_top_bits(first + 320, second + 320, third + 320),
        of_top_bits(first + 384, second + 384, third + 384),
        of_top_bits(first + 448, second + 448, third + 448),
    )
