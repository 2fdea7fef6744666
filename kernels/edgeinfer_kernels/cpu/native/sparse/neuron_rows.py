"""Rows of gate or up for a list of neurons, one after the other.

The blocks of 32 columns of a row are interleaved by sixteen (`neuron_layout.py`), so a lane is a block. The
arithmetic of `rows.py` is used unchanged, with activations interleaved in the same way; a row ends with one
sum across the lanes.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from numba import types

from edgeinfer_kernels.cpu.layout.fields import ROWS_PER_GROUP, split_fields
from edgeinfer_kernels.cpu.native.gemv.codes import nibbles, nibbles_with_fifth_bits
from edgeinfer_kernels.cpu.native.gemv.interleave import gather_words
from edgeinfer_kernels.cpu.native.gemv.row_formats import ROW_FORMATS
from edgeinfer_kernels.cpu.native.gemv.rows import RowFormat, make_accumulate, unpack_for_dots
from edgeinfer_kernels.cpu.native.simd.byte_lanes import (
    bits_of_bytes,
    load_bytes,
    load_ints,
    load_signed_bytes,
    load_unsigned_bytes,
    or_bytes,
    shift_bytes_left,
    to_float,
)
from edgeinfer_kernels.cpu.native.simd.exports import device_function
from edgeinfer_kernels.cpu.native.simd.float_lanes import lanes_sum, load_f16, multiply, splat_f32
from edgeinfer_kernels.cpu.native.simd.scalars import load_i32, prefetch, store_f32, store_i32
from edgeinfer_kernels.cpu.runtime.abi import ACTIVATION_BYTES, CACHE_LINE, ROWS_AHEAD
from edgeinfer_quant_formats.formats import FORMATS

NEURON_ROWS_ARGUMENTS = 10
"""weights, groups, row_bytes, slots, list, count, activations, output, next_weights, next_row_bytes:
addresses, numbers of groups and neurons, and the distance of two rows.

slots: 0, or the index of each neuron's row, int32. `list` is int32; the ROWS_AHEAD entries after the last are
the first ones of the list that is multiplied next, whose rows begin at `next_weights`, or negative.
`activations` are one token's by lanes; `output` is float32, by neuron.
"""
ACTIVATION_WORDS = ACTIVATION_BYTES // 4
LANES_BYTES = ROWS_PER_GROUP * ACTIVATION_BYTES


@device_function
def unsigned_factor(f16_scales, factors):
    """A float16 times an unsigned byte, for sixteen lanes."""
    return multiply(load_f16(f16_scales), to_float(load_unsigned_bytes(factors)))


@device_function
def signed_factor(f16_scales, factors):
    """A float16 times a signed byte, for sixteen lanes."""
    return multiply(load_f16(f16_scales), to_float(load_signed_bytes(factors)))


@device_function
def unpack_q4_k_split(block, index):
    scale = unsigned_factor(block, block + 64)
    return (*nibbles(block + 96), scale, unsigned_factor(block + 32, block + 80))


@device_function
def unpack_q5_k_split(block, index):
    weights = nibbles_with_fifth_bits(block + 160, load_ints(block + 96))
    return (*weights, unsigned_factor(block, block + 64), unsigned_factor(block + 32, block + 80))


@device_function
def with_two_bits(weights, high, index):
    """Set bits 4 and 5 of four columns from bits 2·index… of each byte of `high`."""
    return or_bytes(weights, shift_bytes_left(bits_of_bytes(high, 2 * index, 3), 4))


@device_function
def unpack_q6_k_split(block, index):
    w = nibbles(block + 64)
    first = load_bytes(block + 320)
    last = load_bytes(block + 384)
    return (
        with_two_bits(w[0], first, 0),
        with_two_bits(w[1], first, 1),
        with_two_bits(w[2], first, 2),
        with_two_bits(w[3], first, 3),
        with_two_bits(w[4], last, 0),
        with_two_bits(w[5], last, 1),
        with_two_bits(w[6], last, 2),
        with_two_bits(w[7], last, 3),
        signed_factor(block, block + 32),
        signed_factor(block, block + 48),
    )


def split_format(name: str, unpack: Any) -> RowFormat:
    """A format of super-blocks, split into blocks of 32 columns."""
    last = split_fields(FORMATS[name])[-1]
    nbytes = last.offset + last.unit * last.count
    return replace(ROW_FORMATS[name], unpack=unpack, block_bytes=nbytes, sub_blocks=1)


SPLIT_FORMATS: dict[str, RowFormat] = {
    "Q4_0": ROW_FORMATS["Q4_0"],
    "Q8_0": ROW_FORMATS["Q8_0"],
    "Q4_K": split_format("Q4_K", unpack_q4_k_split),
    "Q5_K": split_format("Q5_K", unpack_q5_k_split),
    "Q6_K": split_format("Q6_K", unpack_q6_k_split),
}


@device_function
def row_of(weights, row_bytes, slots, neuron):
    """The address of a neuron's row."""
    index = types.int64(neuron)
    if slots != 0:
        index = types.int64(load_i32(slots + 4 * index))
    return weights + index * row_bytes


def make_neuron_rows(row_format: RowFormat) -> Callable[..., None]:
    """The kernel for NEURON_ROWS_ARGUMENTS int64: output[n] = row n · activations, for the neurons of a list.

    It prefetches ROWS_AHEAD rows ahead, also those of the next list. Reads count·groups·16 blocks and writes
    count·4 bytes.
    """
    unpack, accumulate = unpack_for_dots(row_format), make_accumulate(row_format, by_lanes=True)
    group_bytes = row_format.group_bytes

    def neuron_rows(
        weights, groups, row_bytes, slots, neurons, count, activations, output, next_weights, next_row_bytes
    ):
        for index in range(count):
            at = neurons + 4 * index
            row = row_of(weights, row_bytes, slots, load_i32(at))
            ahead, following = types.int64(0), types.int64(load_i32(at + 4 * ROWS_AHEAD))
            if index + ROWS_AHEAD < count:
                ahead = row_of(weights, row_bytes, slots, following)
            elif following >= 0:
                ahead = row_of(next_weights, next_row_bytes, slots, following)
            total = splat_f32(0)
            for group in range(groups):
                if ahead != 0:
                    for line in range(0, group_bytes, CACHE_LINE):
                        prefetch(ahead + group * group_bytes + line)
                unpacked = unpack(row + group * group_bytes, 0)
                total = accumulate(unpacked, activations + LANES_BYTES * group, total)
            store_f32(output + 4 * load_i32(at), lanes_sum(total))

    return neuron_rows


@device_function
def activations_by_lanes(source, columns, target):
    """A token's quantized activations with sixteen blocks interleaved, zero-padded."""
    blocks = columns // 32
    for first in range(0, blocks, ROWS_PER_GROUP):
        count = min(ROWS_PER_GROUP, blocks - first)
        to = target + LANES_BYTES * (first // ROWS_PER_GROUP)
        at = source + ACTIVATION_BYTES * first
        if count == ROWS_PER_GROUP:
            gather_words(at, ACTIVATION_BYTES, to, ACTIVATION_WORDS)
            continue
        for word in range(ACTIVATION_WORDS):
            for lane in range(ROWS_PER_GROUP):
                value = load_i32(at + ACTIVATION_BYTES * lane + 4 * word) if lane < count else 0
                store_i32(to + 64 * word + 4 * lane, value)
