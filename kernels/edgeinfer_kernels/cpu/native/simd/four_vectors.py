"""Groups of four registers, and the attention operations on them for any cache type."""

import numpy as np

from edgeinfer_kernels.cpu.native.simd.exports import device_function
from edgeinfer_kernels.cpu.native.simd.float_lanes import (
    load_floats,
    multiply,
    multiply_add,
    splat_f32,
    store_floats,
)
from edgeinfer_kernels.cpu.native.simd.scalars import load_f32, prefetch
from edgeinfer_kernels.cpu.native.simd.vector_math import hyperbolic_tangent
from edgeinfer_kernels.cpu.runtime.abi import CACHE_LINE


@device_function
def four_zeros():
    zero = splat_f32(np.float32(0))
    return zero, zero, zero, zero


@device_function
def two_zeros():
    zero = splat_f32(np.float32(0))
    return zero, zero


@device_function
def scaled_four(at, factor):
    """Sixty-four floats times a factor."""
    f = splat_f32(factor)
    return (
        multiply(load_floats(at), f),
        multiply(load_floats(at + 64), f),
        multiply(load_floats(at + 128), f),
        multiply(load_floats(at + 192), f),
    )


@device_function
def store_four(at, x):
    store_floats(at, x[0])
    store_floats(at + 64, x[1])
    store_floats(at + 128, x[2])
    store_floats(at + 192, x[3])


@device_function
def store_two(at, x):
    store_floats(at, x[0])
    store_floats(at + 64, x[1])


@device_function
def add_products(factor, x, total):
    """total + factor·x, for the float32 at the address `factor`."""
    f = splat_f32(load_f32(factor))
    return (
        multiply_add(f, x[0], total[0]),
        multiply_add(f, x[1], total[1]),
        multiply_add(f, x[2], total[2]),
        multiply_add(f, x[3], total[3]),
    )


@device_function
def add_two_products(factor, x, total):
    """As `add_products` for two registers."""
    f = splat_f32(load_f32(factor))
    return multiply_add(f, x[0], total[0]), multiply_add(f, x[1], total[1])


@device_function
def capped(scores, scale, soft_cap):
    """Sixteen scores times the scale, soft-capped."""
    s = multiply(scores, splat_f32(scale))
    if soft_cap > np.float32(0):
        inside = multiply(s, splat_f32(np.float32(1) / soft_cap))
        s = multiply(splat_f32(soft_cap), hyperbolic_tangent(inside))
    return s


@device_function
def cap_scores(scores, scale, soft_cap, last):
    """Scale and soft-cap the scores before `last`, rounded up to 16, in place."""
    for offset in range(0, 4 * last, 64):
        store_floats(scores + offset, capped(load_floats(scores + offset), scale, soft_cap))


def make_load_four(load_cached):
    @device_function
    def load_four(at, stride):
        return (
            load_cached(at),
            load_cached(at + stride),
            load_cached(at + 2 * stride),
            load_cached(at + 3 * stride),
        )

    return load_four


def make_load_two(load_cached):
    @device_function
    def load_two(at, stride):
        return load_cached(at), load_cached(at + stride)

    return load_two


def make_prefetch(nbytes):
    """`prefetch_next(at, step, ahead)`: prefetches the `step`-th `nbytes` at `ahead` bytes after `at`, if
    `ahead` is not 0.

    The tiles of a cache are read once, in order, but in runs too short for the hardware prefetcher.
    """

    @device_function
    def prefetch_next(at, step, ahead):
        if ahead != 0:
            for line in range(0, nbytes, CACHE_LINE):
                prefetch(at + ahead + nbytes * step + line)

    return prefetch_next
