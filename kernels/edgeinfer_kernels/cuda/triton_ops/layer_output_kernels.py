"""The kernels of a layer's end and of experts besides a dense feed-forward: per-layer inputs, layer scales,
and norms of two results before their sum.
"""

import triton
import triton.language as tl

from edgeinfer_kernels.cuda.triton_ops.activations import activate
from edgeinfer_kernels.cuda.triton_ops.norm_kernels import RMS, normed
from edgeinfer_kernels.cuda.triton_ops.raw_rows import decode_raw
from edgeinfer_kernels.cuda.triton_ops.tiles import quantize, release_consumers, wait_for_producers
from edgeinfer_kernels.cuda.triton_ops.waiting import await_number

SENT = tl.constexpr(0)
AWAITED = tl.constexpr(1)
TABLE = tl.constexpr(2)


@triton.jit
def per_layer_inputs_kernel(
    projected, stride, row_scales, rows, ids, numbers, norm, out, scale, embedding_scale,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, RAW: tl.constexpr, SCALED: tl.constexpr, ROWS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out (tokens, layers, WIDTH) = (rms(projected · scale) + rows · embedding_scale) / √2; program (layer,
    token).

    `projected`: rows of `stride` elements; with SCALED they are still to be multiplied by `row_scales`.
    `rows`, `ids`, RAW and `numbers` as in `PerLayerSpace`. ROWS: `rows` are the whole TABLE, or those of the
    tokens in host memory, which are AWAITED if they are valid only when the first number has reached the
    second. Reads WIDTH · 4 bytes and the rows; writes WIDTH · 4.
    """
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    layer, token = tl.program_id(0), tl.program_id(1).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < WIDTH
    x = tl.load(projected + token * stride + layer * WIDTH + offsets, mask=mask, other=0.0) * scale
    if SCALED:
        x = x * tl.load(row_scales + token)
    x = normed(x, mask, norm.weight, norm.weight, offsets, norm.epsilon, WIDTH, RMS, False)
    if ROWS == AWAITED:
        await_number(numbers, tl.load(numbers + 1), numbers + 2, numbers + 2)
    at = (token * tl.num_programs(0) + layer) * WIDTH + offsets
    number = token
    if ROWS == TABLE:
        number = tl.load(ids + token).to(tl.int64)
    if RAW is None:
        row = tl.load(rows + at, mask=mask, other=0.0)
    else:
        row = decode_raw(rows + number * RAW.row_bytes, layer * WIDTH + offsets, mask, RAW)
    tl.store(out + at, (x + row * embedding_scale) * 0.7071067811865476, mask=mask)


@triton.jit
def gate_inputs_kernel(
    gate, stride, row_scales, inputs, inputs_stride, out,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr,
    SCALED: tl.constexpr, OUT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """activation(gate) ⊙ inputs (tokens, WIDTH) as activations, or without OUT in place; program (token,).

    With SCALED the gate is still to be multiplied by `row_scales`. Reads WIDTH · 8 bytes; writes WIDTH · 4,
    or 12 words (44 with floats) per 32 columns.
    """
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    group = tl.arange(0, BLOCK // 16)
    column = group[:, None] * 16 + tl.arange(0, 16)[None, :]
    mask = column < WIDTH
    at = gate + token * stride + column
    x = tl.load(at, mask=mask, other=0.0)
    if SCALED:
        x = x * tl.load(row_scales + token)
    value = activate(x, ACTIVATION) * tl.load(inputs + token * inputs_stride + column, mask=mask, other=0.0)
    if OUT is None:
        tl.store(at, value, mask=mask)
    else:
        quantize(value, out + token * (OUT.planes * OUT.blocks), group, group < 2 * OUT.blocks, OUT)


@triton.jit
def finish_layer_kernel(
    x, y, stride, row_scales, norm, scale,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ADDS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """x (tokens, WIDTH) = scale · (x + rms(y · row_scales)), or scale · x without ADDS; program (token,).

    Reads WIDTH · 8 bytes, writes WIDTH · 4.
    """
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < WIDTH
    at = x + token * WIDTH + offsets
    value = tl.load(at, mask=mask, other=0.0)
    if ADDS:
        result = tl.load(y + token * stride + offsets, mask=mask, other=0.0) * tl.load(row_scales + token)
        value += normed(result, mask, norm.weight, norm.weight, offsets, norm.epsilon, WIDTH, RMS, False)
    tl.store(at, value * scale, mask=mask)


@triton.jit
def add_normed_kernel(
    y, y_stride, z, z_stride, row_scales, y_norm, z_norm,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, SCALED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """y (tokens, WIDTH) = rms(y) + rms(z), each with weights, in place; program (token,).

    With SCALED z is still to be multiplied by `row_scales`. Reads WIDTH · 8 bytes, writes WIDTH · 4.
    """
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    token = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < WIDTH
    at = y + token * y_stride + offsets
    value = tl.load(at, mask=mask, other=0.0)
    other = tl.load(z + token * z_stride + offsets, mask=mask, other=0.0)
    if SCALED:
        other = other * tl.load(row_scales + token)
    value = normed(value, mask, y_norm.weight, y_norm.weight, offsets, y_norm.epsilon, WIDTH, RMS, False)
    other = normed(other, mask, z_norm.weight, z_norm.weight, offsets, z_norm.epsilon, WIDTH, RMS, False)
    tl.store(at, value + other, mask=mask)
