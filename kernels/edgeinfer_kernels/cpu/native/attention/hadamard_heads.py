"""Heads times the orthonormal Hadamard matrix, for a 4-bit cache: `cache_formats.hadamard_rows`."""

from typing import Any

import numpy as np
from llvmlite import ir

from edgeinfer_kernels.cpu.native.simd.exports import device_function
from edgeinfer_kernels.cpu.native.simd.float_lanes import (
    add,
    load_floats,
    multiply,
    splat_f32,
    store_floats,
    subtract,
)
from edgeinfer_kernels.cpu.native.simd.lanes import F32, I32, LANES, float16x, operation


def _make_butterfly(step: int) -> Any:
    """An intrinsic: for each pair of lanes `step` apart, x + y in the first and x - y in the second."""

    def butterfly(builder: Any, x: Any) -> Any:
        others = ir.Constant(ir.VectorType(I32, LANES), [lane ^ step for lane in range(LANES)])
        signs = [-1.0 if lane & step else 1.0 for lane in range(LANES)]
        signed = builder.fmul(x, ir.Constant(ir.VectorType(F32, LANES), signs))
        return builder.fadd(builder.shuffle_vector(x, x, others), signed)

    return operation(float16x, (float16x,))(butterfly)


butterfly_1, butterfly_2, butterfly_4, butterfly_8 = (_make_butterfly(step) for step in (1, 2, 4, 8))


@device_function
def hadamard_lanes(x, block):
    """The unscaled transform for blocks of at most sixteen lanes."""
    if block > 1:
        x = butterfly_1(x)
    if block > 2:
        x = butterfly_2(x)
    if block > 4:
        x = butterfly_4(x)
    return butterfly_8(x) if block > 8 else x


@device_function
def hadamard_head(head, head_dim, padded):
    """Transform in place, block by block; zeros after head_dim stay zero. Reads and writes head_dim·4 bytes
    in L1, log2 of the block size - 3 times.
    """
    block = head_dim & -head_dim
    scale = splat_f32(np.float32(1) / np.float32(np.sqrt(np.float32(block))))
    for d in range(0, padded, LANES):
        store_floats(head + 4 * d, multiply(hadamard_lanes(load_floats(head + 4 * d), block), scale))
    step = LANES
    while step < block:
        for begin in range(0, head_dim, 2 * step):
            for d in range(begin, begin + step, LANES):
                low, high = load_floats(head + 4 * d), load_floats(head + 4 * (d + step))
                store_floats(head + 4 * d, add(low, high))
                store_floats(head + 4 * (d + step), subtract(low, high))
        step *= 2
