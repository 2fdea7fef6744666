"""Exponentials and activation functions on sixteen lanes, and norms over padded rows of float32."""

import math

import numpy as np

from edgeinfer_kernels.cpu.native.simd.byte_lanes import to_float
from edgeinfer_kernels.cpu.native.simd.exports import device_function
from edgeinfer_kernels.cpu.native.simd.float_lanes import (
    absolute,
    add,
    at_least,
    at_most,
    divide,
    lanes_max_magnitude,
    lanes_sum,
    larger_magnitude,
    load_floats,
    multiply,
    multiply_add,
    nearest_int,
    splat_f32,
    store_floats,
    subtract,
    two_to_the,
)
from edgeinfer_kernels.cpu.native.simd.scalars import load_f32
from edgeinfer_kernels.cpu.runtime.abi import ACTIVATION_CODES, CLAMPED_SWIGLU_LIMIT, CLAMPED_SWIGLU_SLOPE

SILU, GELU, RELU = (ACTIVATION_CODES[name] for name in ("silu", "gelu", "relu"))
CLAMPED_SWIGLU, DRELU = ACTIVATION_CODES["clamped_swiglu"], ACTIVATION_CODES["drelu"]
FIRST_ADDRESS = 1 << 10
"""Codes from here on are addresses."""
SLOPE, LIMIT = np.float32(CLAMPED_SWIGLU_SLOPE), np.float32(CLAMPED_SWIGLU_LIMIT)


@device_function
def exponential(x):
    """eˣ with relative error below 2e-7; x is clamped to [-87, 88]; NaN stays NaN. Cody-Waite reduction,
    degree 6.
    """
    x = at_least(at_most(x, np.float32(88)), np.float32(-87))
    n = nearest_int(multiply(x, splat_f32(np.float32(1.44269504))))
    whole = to_float(n)
    r = multiply_add(whole, splat_f32(np.float32(-0.693145752)), x)
    r = multiply_add(whole, splat_f32(np.float32(-1.42860677e-6)), r)
    p = splat_f32(np.float32(1 / 720))
    p = multiply_add(p, r, splat_f32(np.float32(1 / 120)))
    p = multiply_add(p, r, splat_f32(np.float32(1 / 24)))
    p = multiply_add(p, r, splat_f32(np.float32(1 / 6)))
    p = multiply_add(p, r, splat_f32(np.float32(1 / 2)))
    p = multiply_add(p, r, splat_f32(np.float32(1)))
    p = multiply_add(p, r, splat_f32(np.float32(1)))
    return multiply(p, two_to_the(n))


@device_function
def sigmoid(x):
    one = splat_f32(np.float32(1))
    return divide(one, add(one, exponential(subtract(splat_f32(np.float32(0)), x))))


@device_function
def softplus(x, bias):
    """log(1 + e^(x + bias)), by the series of 2·atanh(y / (2 + y)) = log(1 + y) for y = e^-|x + bias|."""
    zero = splat_f32(np.float32(0))
    x = add(x, bias)
    y = exponential(subtract(zero, absolute(x)))
    s = divide(y, add(y, splat_f32(np.float32(2))))
    square = multiply(s, s)
    p = splat_f32(np.float32(2 / 15))
    p = multiply_add(p, square, splat_f32(np.float32(2 / 13)))
    p = multiply_add(p, square, splat_f32(np.float32(2 / 11)))
    p = multiply_add(p, square, splat_f32(np.float32(2 / 9)))
    p = multiply_add(p, square, splat_f32(np.float32(2 / 7)))
    p = multiply_add(p, square, splat_f32(np.float32(2 / 5)))
    p = multiply_add(p, square, splat_f32(np.float32(2 / 3)))
    p = multiply_add(p, square, splat_f32(np.float32(2)))
    return multiply_add(p, s, at_least(x, np.float32(0)))


@device_function
def hyperbolic_tangent(x):
    """tanh x = 2·sigmoid(2x) - 1."""
    two = splat_f32(np.float32(2))
    return subtract(multiply(two, sigmoid(multiply(two, x))), splat_f32(np.float32(1)))


@device_function
def activate(code, x):
    """SiLU x·sigmoid(x); GELU by tanh, x·sigmoid(1.5957691·(x + 0.044715·x³)); ReLU; ReLU squared."""
    if code == SILU:
        return multiply(x, sigmoid(x))
    if code == GELU:
        cube = multiply(multiply(x, x), x)
        inside = multiply_add(cube, splat_f32(np.float32(0.044715)), x)
        return multiply(x, sigmoid(multiply(inside, splat_f32(np.float32(1.5957691216)))))
    positive = at_least(x, np.float32(0))
    if code == RELU:
        return positive
    return multiply(positive, positive)


@device_function
def activate_gated(code, gate, up):
    """activation(gate)·up. dReLU: relu(gate)·relu(up). Clamped SwiGLU: g·sigmoid(slope·g)·(u + 1), with
    g = min(gate, limit), u = up within ±limit. A larger code is the address of the limit of
    min(silu(gate), limit)·up, up within ±limit.
    """
    if code >= FIRST_ADDRESS:
        limit = load_f32(code)
        up = at_least(at_most(up, limit), -limit)
        return multiply(at_most(activate(SILU, gate), limit), up)
    if code == CLAMPED_SWIGLU:
        gate = at_most(gate, LIMIT)
        up = at_least(at_most(up, LIMIT), -LIMIT)
        slope = sigmoid(multiply(gate, splat_f32(SLOPE)))
        return multiply(multiply(gate, slope), add(up, splat_f32(np.float32(1))))
    if code == DRELU:
        return multiply(at_least(gate, np.float32(0)), at_least(up, np.float32(0)))
    return multiply(activate(code, gate), up)


@device_function
def largest_magnitude(x, count):
    """max |x| of `count` floats; NaN if one of them is."""
    peak = splat_f32(np.float32(0))
    for i in range(0, count, 16):
        peak = larger_magnitude(peak, load_floats(x + 4 * i))
    return lanes_max_magnitude(peak)


@device_function
def sum_of_products(x, y, count):
    """Σ x·y over `count` floats, a multiple of 16."""
    even = splat_f32(np.float32(0))
    odd = splat_f32(np.float32(0))
    for i in range(0, count - 16, 32):
        even = multiply_add(load_floats(x + 4 * i), load_floats(y + 4 * i), even)
        odd = multiply_add(load_floats(x + 4 * i + 64), load_floats(y + 4 * i + 64), odd)
    if count % 32 == 16:
        i = count - 16
        even = multiply_add(load_floats(x + 4 * i), load_floats(y + 4 * i), even)
    return lanes_sum(add(even, odd))


@device_function
def rms_norm(x, weight, out, count, padded, epsilon):
    """out = x / √(mean x² + ε) · weight; rows are zero from `count` to `padded`. weight = 0: none."""
    mean = sum_of_products(x, x, padded) / np.float32(count)
    scale = splat_f32(np.float32(1) / np.float32(math.sqrt(mean + epsilon)))
    for i in range(0, padded, 16):
        y = multiply(load_floats(x + 4 * i), scale)
        if weight != 0:
            y = multiply(y, load_floats(weight + 4 * i))
        store_floats(out + 4 * i, y)


@device_function
def layer_norm(x, weight, bias, out, count, padded, epsilon):
    """out = (x - mean) / √(variance + ε) · weight + bias; rows are zero from `count` to `padded`."""
    total = splat_f32(np.float32(0))
    for i in range(0, padded, 16):
        total = add(total, load_floats(x + 4 * i))
    mean = lanes_sum(total) / np.float32(count)
    center = splat_f32(mean)
    sum_squares = splat_f32(np.float32(0))
    for i in range(0, padded, 16):
        d = subtract(load_floats(x + 4 * i), center)
        sum_squares = multiply_add(d, d, sum_squares)
    padding = np.float32(padded - count) * mean * mean
    variance = (lanes_sum(sum_squares) - padding) / np.float32(count)
    scale = splat_f32(np.float32(1) / np.float32(math.sqrt(variance + epsilon)))
    for i in range(0, padded, 16):
        y = multiply(subtract(load_floats(x + 4 * i), center), scale)
        if weight != 0:
            y = multiply(y, load_floats(weight + 4 * i))
        if bias != 0:
            y = add(y, load_floats(bias + 4 * i))
        store_floats(out + 4 * i, y)
