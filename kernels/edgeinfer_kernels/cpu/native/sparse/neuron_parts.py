"""How the threads share a down projection by neurons: by blocks of neurons, or by outputs."""

from numba import types

from edgeinfer_kernels.cpu.native.simd.exports import device_function
from edgeinfer_kernels.cpu.native.simd.scalars import (
    load_i32,
    load_i64,
    load_u8,
    prefetch,
    store_i32,
    store_i64,
)
from edgeinfer_kernels.cpu.runtime.abi import (
    ACTIVATION_BYTES,
    MAX_SUM_PARTS,
    OUTPUTS_PER_TILE,
    SPARSE_TOKENS,
)

FACTOR_BITS = 16
"""About the bits of a block's factors per output."""


@device_function
def list_steps(columns, bits, part, parts, tokens, activations, stride, scratch):
    """List the (block, token) of a part, in `scratch` after the shares of the parts; return their number.

    In order, each block with an active neuron goes to the next part that has at most the average of the bytes
    so far: the parts read about the same. `bits`: of a weight; FACTOR_BITS are those of a block's factors.
    Depends on nothing but a token's own activity and the number of parts, also if the blocks are summed in
    several rounds.
    """
    parts = min(parts, MAX_SUM_PARTS)
    shares, steps, count = scratch, scratch + 8 * MAX_SUM_PARTS, 0
    first = columns.first_block
    for token in range(tokens):
        for each in range(parts):
            store_i64(shares + 8 * each, 0)
        counts = columns.counts + token * columns.counts_stride
        at, total = 0, 0
        for block in range(first + columns.blocks):
            active = load_u8(counts + block)
            if active == 0:
                continue
            while load_i64(shares + 8 * at) * parts > total:
                at = at + 1 if at + 1 < parts else 0
            read = active * bits + FACTOR_BITS
            total += read
            store_i64(shares + 8 * at, load_i64(shares + 8 * at) + read)
            if at == part and block >= first:
                store_i32(steps + 4 * count, block * SPARSE_TOKENS + token)
                prefetch(activations + token * stride + ACTIVATION_BYTES * block)
                prefetch(activations + token * stride + ACTIVATION_BYTES * (block + 1) - 1)
                count += 1
            at = at + 1 if at + 1 < parts else 0
    return count


@device_function
def step_of(columns, step, tokens, by_outputs, scratch):
    """(block, token) of a step."""
    if by_outputs != 0:
        return columns.first_block + step // tokens, step % tokens
    both = types.int64(load_i32(scratch + 8 * MAX_SUM_PARTS + 4 * step))
    return both // SPARSE_TOKENS, both % SPARSE_TOKENS


@device_function
def part_of_outputs(outputs, part, parts):
    """The first output of a part, in whole tiles."""
    return outputs // OUTPUTS_PER_TILE * part // parts * OUTPUTS_PER_TILE
