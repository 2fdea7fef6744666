"""The down projection in the per-neuron layout: sums over the active ones of 32 neurons.

Formula: out[r] = Σ_b scale[r, b]·s[b]·(Σ_{n in b, active} q[r, n]·a[n]) - minimum[r, b]·sum[b], as in
`rows.py`, with the same integers and the same order of blocks. A neuron is active if its int8 activation in
its block is not 0, so the result is exact. The bytes of four neurons are interleaved and multiplied in one
dot product.
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numba import types

from edgeinfer_kernels.cpu.native.gemv.row_formats import ROW_FORMATS
from edgeinfer_kernels.cpu.native.gemv.rows import broadcast
from edgeinfer_kernels.cpu.native.simd.byte_lanes import (
    bits_of_bytes,
    interleave_high_bytes,
    interleave_high_shorts,
    interleave_low_bytes,
    interleave_low_shorts,
    load_bytes,
    nonzero_bytes,
    to_float,
)
from edgeinfer_kernels.cpu.native.simd.dots import dot_start, dot_sum, raise_signed
from edgeinfer_kernels.cpu.native.simd.exports import device_function
from edgeinfer_kernels.cpu.native.simd.float_lanes import (
    load_f16,
    load_floats,
    multiply,
    multiply_add,
    splat_f32,
    store_floats,
    subtract_product,
)
from edgeinfer_kernels.cpu.native.simd.scalars import (
    load_i32,
    load_i64,
    load_u8,
    prefetch,
    store_i8,
    store_i64,
    trailing_zeros,
)
from edgeinfer_kernels.cpu.native.sparse.neuron_parts import list_steps, part_of_outputs, step_of
from edgeinfer_kernels.cpu.native.sparse.neuron_rows import signed_factor, unsigned_factor
from edgeinfer_kernels.cpu.runtime.abi import (
    ACTIVATION_BYTES,
    ACTIVATIONS,
    ACTIVE_BYTES,
    ACTIVE_LISTS,
    BLOCKS_AHEAD,
    CACHE_LINE,
    NEURONS_PER_BLOCK,
    OUTPUTS_PER_TILE,
)
from edgeinfer_quant_formats.formats import FORMATS

NEURON_SUMS_ARGUMENTS = 10
"""columns, part, parts, activations, activation_stride, tokens, output, output_stride, scratch, by_outputs.

`columns` is a NeuronColumnsArgs, of whose blocks `part` of `parts` is summed, or if `by_outputs`, of whose
outputs: then only those are written. Activations are int8 blocks; `scratch` is SUMS_SCRATCH of thread-private
memory, and without `by_outputs` also 4 bytes for each block and token.
"""
QUAD_BYTES = 48
"""Four neurons: the addresses of their weights, then their activations, one byte each."""
QUADS = ACTIVE_BYTES - 16
"""Offset of the number of quads; it is followed by the number of those in the first 16 neurons."""


@dataclass(frozen=True)
class ColumnFormat:
    """A per-neuron format as the kernel uses it: unsigned codes with `offset` added, or signed ones.

    `factors`: "half": a float16 scale for 32 neurons; "minimum": a float16 times a byte, and another such
    product to subtract; "two": a float16 times a signed byte for 16 neurons each.
    """

    bits: int
    largest: int
    factors: str
    signed: bool = False
    offset: int = 0


def column_format(name: str) -> ColumnFormat:
    """The per-neuron layout of a format with a GEMV kernel; codes of more than four bits take a byte."""
    spec, row_format = FORMATS[name], ROW_FORMATS[name]
    factors = "half" if spec.sub_scales is None else "minimum" if row_format.minima else "two"
    bits = 4 if spec.bits == 4 else 8
    return ColumnFormat(bits, row_format.largest, factors, row_format.signed, row_format.offset)


COLUMN_FORMATS = {name: column_format(name) for name in ("Q4_0", "Q8_0", "Q4_K", "Q5_K", "Q6_K")}


@device_function
def list_bits(active, count, bits, activations, rows, slots, neuron_bytes):
    """Append the neurons whose bits are set, and pad the last quad with the last neuron times 0."""
    at = rows
    while bits != 0:
        neuron = trailing_zeros(bits)
        index = neuron if slots == 0 else types.int64(load_i32(slots + 4 * neuron))
        at = rows + index * neuron_bytes
        quad = active + QUAD_BYTES * (count // 4)
        store_i64(quad + 8 * (count % 4), at)
        store_i8(quad + 32 + count % 4, load_u8(activations + neuron))
        bits &= bits - 1
        count += 1
    while count % 4 != 0:
        quad = active + QUAD_BYTES * (count // 4)
        store_i64(quad + 8 * (count % 4), at)
        store_i8(quad + 32 + count % 4, 0)
        count += 1
    return count


@device_function
def list_active(active, activations, rows, slots, neuron_bytes, by_halves):
    """List the active neurons of a block, as quads."""
    bits = nonzero_bytes(activations)
    first = list_bits(active, 0, bits & 0xFFFF if by_halves else bits, activations, rows, slots, neuron_bytes)
    last = first
    if by_halves:
        last = list_bits(active, first, bits & 0xFFFF0000, activations, rows, slots, neuron_bytes)
    store_i64(active + QUADS, last // 4)
    store_i64(active + QUADS + 8, first // 4)


@device_function
def block_address(columns, block):
    """The address of a block's factors, and of those of its super-block."""
    each = columns.blocks_per_super
    super_block = columns.weights
    super_block += block // each * columns.super_bytes
    at = super_block + columns.super_factor_bytes
    return at + block % each * columns.block_bytes, super_block


def make_sums(spec: ColumnFormat):
    """`sums_of_bytes(start, active, first, last, place)` of a range of quads for 64 outputs, and
    `sums_of_nibbles(start, active, quads, place)` for 128, as integers, from `start` on.
    """
    signed = spec.signed
    add_product = dot_sum(1, signed=signed, largest=spec.largest)

    @device_function
    def add_four(sums, a, b, c, d, word):
        low, high = interleave_low_bytes(a, b), interleave_high_bytes(a, b)
        low_too, high_too = interleave_low_bytes(c, d), interleave_high_bytes(c, d)
        w0, w1 = interleave_low_shorts(low, low_too), interleave_high_shorts(low, low_too)
        w2, w3 = interleave_low_shorts(high, high_too), interleave_high_shorts(high, high_too)
        if signed:
            w0, w1, w2, w3 = raise_signed(w0), raise_signed(w1), raise_signed(w2), raise_signed(w3)
        return (
            add_product(sums[0], w0, word),
            add_product(sums[1], w1, word),
            add_product(sums[2], w2, word),
            add_product(sums[3], w3, word),
        )

    @device_function
    def sums_of_bytes(start, active, first, last, begin):
        sums = start, start, start, start
        for quad in range(first, last):
            at = active + QUAD_BYTES * quad
            a = load_bytes(load_i64(at) + begin)
            b = load_bytes(load_i64(at + 8) + begin)
            c = load_bytes(load_i64(at + 16) + begin)
            d = load_bytes(load_i64(at + 24) + begin)
            sums = add_four(sums, a, b, c, d, at + 32)
        return sums

    @device_function
    def sums_of_nibbles(start, active, quads, begin):
        low = high = start, start, start, start
        for quad in range(quads):
            at = active + QUAD_BYTES * quad
            a = load_bytes(load_i64(at) + begin // 2)
            b = load_bytes(load_i64(at + 8) + begin // 2)
            c = load_bytes(load_i64(at + 16) + begin // 2)
            d = load_bytes(load_i64(at + 24) + begin // 2)
            low = add_four(
                low,
                bits_of_bytes(a, 0, 15),
                bits_of_bytes(b, 0, 15),
                bits_of_bytes(c, 0, 15),
                bits_of_bytes(d, 0, 15),
                at + 32,
            )
            high = add_four(
                high,
                bits_of_bytes(a, 4, 15),
                bits_of_bytes(b, 4, 15),
                bits_of_bytes(c, 4, 15),
                bits_of_bytes(d, 4, 15),
                at + 32,
            )
        return low, high

    return sums_of_bytes, sums_of_nibbles


def make_add_registers(spec: ColumnFormat):
    """`add_registers(sums, factors, f16_scales, outputs, place, activations, out)`: adds the sums of 64
    outputs times their factors, for formats with one scale per 32 neurons.
    """

    @device_function
    def add_f16_scale(sums, factors, f16_scales, outputs, begin, activations, out):
        at = out + 4 * begin
        scale = multiply(load_f16(f16_scales + 2 * begin), broadcast(activations, ACTIVATIONS.scale))
        store_floats(at, multiply_add(to_float(sums), scale, load_floats(at)))

    @device_function
    def add_minimum(sums, factors, f16_scales, outputs, begin, activations, out):
        at = out + 4 * begin
        scale = unsigned_factor(f16_scales + 2 * begin, factors + begin)
        minimum = unsigned_factor(f16_scales + 2 * (outputs + begin), factors + outputs + begin)
        total = multiply_add(
            to_float(sums), multiply(scale, broadcast(activations, ACTIVATIONS.scale)), load_floats(at)
        )
        store_floats(at, subtract_product(minimum, broadcast(activations, ACTIVATIONS.sum), total))

    add_one = add_f16_scale if spec.factors == "half" else add_minimum

    @device_function
    def add_registers(sums, factors, f16_scales, outputs, begin, activations, out):
        add_one(sums[0], factors, f16_scales, outputs, begin, activations, out)
        add_one(sums[1], factors, f16_scales, outputs, begin + 16, activations, out)
        add_one(sums[2], factors, f16_scales, outputs, begin + 32, activations, out)
        add_one(sums[3], factors, f16_scales, outputs, begin + 48, activations, out)

    return add_registers


@device_function
def add_two(first, last, factors, f16_scales, outputs, begin, activations, out):
    """Add the sums of sixteen outputs times their factors, for formats with a scale per 16 neurons."""
    at = out + 4 * begin
    scale = signed_factor(f16_scales + 2 * begin, factors + begin)
    scale_too = signed_factor(f16_scales + 2 * begin, factors + outputs + begin)
    weighted = multiply_add(to_float(last), scale_too, multiply(to_float(first), scale))
    total = multiply_add(weighted, broadcast(activations, ACTIVATIONS.scale), load_floats(at))
    store_floats(at, total)


def make_tile(spec: ColumnFormat):
    """`tile(active, quads, factors, f16_scales, outputs, place, activations, out)`: adds the neurons of a
    block to OUTPUTS_PER_TILE outputs from `begin` on.
    """
    sums_of_bytes, sums_of_nibbles = make_sums(spec)
    add_registers = make_add_registers(spec)
    start, start_first, start_last = (
        dot_start(which, spec.offset, signed=spec.signed) for which in ("all", "first", "last")
    )

    @device_function
    def tile_of_nibbles(active, quads, factors, f16_scales, outputs, begin, activations, out):
        low, high = sums_of_nibbles(start(activations), active, quads, begin)
        add_registers(low, factors, f16_scales, outputs, begin, activations, out)
        add_registers(high, factors, f16_scales, outputs, begin + 64, activations, out)

    @device_function
    def tile_of_bytes(active, quads, factors, f16_scales, outputs, begin, activations, out):
        for here in range(begin, begin + OUTPUTS_PER_TILE, 64):
            sums = sums_of_bytes(start(activations), active, 0, quads, here)
            add_registers(sums, factors, f16_scales, outputs, here, activations, out)

    @device_function
    def tile_of_two(active, quads, factors, f16_scales, outputs, begin, activations, out):
        middle = load_i64(active + QUADS + 8)
        for here in range(begin, begin + OUTPUTS_PER_TILE, 64):
            f = sums_of_bytes(start_first(activations), active, 0, middle, here)
            s = sums_of_bytes(start_last(activations), active, middle, quads, here)
            add_two(f[0], s[0], factors, f16_scales, outputs, here, activations, out)
            add_two(f[1], s[1], factors, f16_scales, outputs, here + 16, activations, out)
            add_two(f[2], s[2], factors, f16_scales, outputs, here + 32, activations, out)
            add_two(f[3], s[3], factors, f16_scales, outputs, here + 48, activations, out)

    if spec.factors == "two":
        return tile_of_two
    return tile_of_nibbles if spec.bits == 4 else tile_of_bytes


def make_neuron_sums(spec: ColumnFormat) -> Callable[..., None]:
    """The kernel for NEURON_SUMS_ARGUMENTS int64: the sums over a part of the neurons, for a few tokens.

    Which neurons doesn't depend on the other tokens, so a token's sums don't either.
    Reads the factors of all blocks with an active neuron, and bits/8 bytes per neuron and output: a neuron's
    weights are contiguous, so a thread that has whole neurons reads few pages.
    """
    tile = make_tile(spec)
    by_halves, has_bytes, bits = (
        spec.factors == "two",
        spec.factors != "half",
        spec.bits,
    )

    @device_function
    def list_neurons(columns, block, token, activations, stride, active):
        at, _ = block_address(columns, block)
        neuron_bytes = columns.neuron_bytes
        rows, slots = at + columns.factor_bytes, columns.slots
        if slots != 0:
            rows = columns.bundles
            slots += 4 * NEURONS_PER_BLOCK * block
        a = activations + token * stride + ACTIVATION_BYTES * block
        list_active(active, a, rows, slots, neuron_bytes, by_halves)

    @device_function
    def prefetch_lines(at, nbytes):
        for line in range(0, nbytes, CACHE_LINE):
            prefetch(at + line)

    @device_function
    def prefetch_tile(active, factors, f16_scales, outputs, begin):
        for quad in range(load_i64(active + QUADS)):
            at = active + QUAD_BYTES * quad
            for neuron in range(4):
                prefetch_lines(load_i64(at + 8 * neuron) + begin * bits // 8, OUTPUTS_PER_TILE * bits // 8)
        if has_bytes:
            prefetch_lines(factors + begin, OUTPUTS_PER_TILE)
            prefetch_lines(factors + outputs + begin, OUTPUTS_PER_TILE)
        else:
            prefetch_lines(f16_scales + 2 * begin, 2 * OUTPUTS_PER_TILE)

    def neuron_sums(
        columns, part, parts, activations, stride, tokens, output, output_stride, scratch, by_outputs
    ):
        outputs = columns.outputs
        first, last, distance = 0, outputs, 1
        lists = scratch + ACTIVE_LISTS * ACTIVE_BYTES
        if by_outputs != 0:
            distance = BLOCKS_AHEAD
            first, last = part_of_outputs(outputs, part, parts), part_of_outputs(outputs, part + 1, parts)
            steps = columns.blocks * tokens
        else:
            steps = list_steps(columns, bits, part, parts, tokens, activations, stride, lists)
        for token in range(tokens if columns.first_block == 0 else 0):
            for begin in range(first, last, 16):
                store_floats(output + token * output_stride + 4 * begin, splat_f32(np.float32(0)))
        for step in range(min(steps, distance)):
            block, token = step_of(columns, step, tokens, by_outputs, lists)
            active = scratch + step % ACTIVE_LISTS * ACTIVE_BYTES
            list_neurons(columns, block, token, activations, stride, active)
            factors, f16_scales = block_address(columns, block)
            for begin in range(first, last if by_outputs == 0 else first, OUTPUTS_PER_TILE):
                prefetch_tile(active, factors, f16_scales, outputs, begin)
        for step in range(steps):
            active = scratch + step % ACTIVE_LISTS * ACTIVE_BYTES
            ahead = min(step + distance, steps - 1)
            following = scratch + ahead % ACTIVE_LISTS * ACTIVE_BYTES
            next_block, token = step_of(columns, ahead, tokens, by_outputs, lists)
            list_neurons(columns, next_block, token, activations, stride, following)
            next_factors, next_f16_scales = block_address(columns, next_block)
            quads, next_quads = load_i64(active + QUADS), load_i64(following + QUADS) if ahead > step else 0
            block, token = step_of(columns, step, tokens, by_outputs, lists)
            factors, f16_scales = block_address(columns, block)
            a = activations + token * stride + ACTIVATION_BYTES * block
            out = output + token * output_stride
            for begin in range(first, last, OUTPUTS_PER_TILE):
                if next_quads != 0:
                    prefetch_tile(following, next_factors, next_f16_scales, outputs, begin)
                if quads != 0:
                    tile(active, quads, factors, f16_scales, outputs, begin, a, out)

    return neuron_sums
