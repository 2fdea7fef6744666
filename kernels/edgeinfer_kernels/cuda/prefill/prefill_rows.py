"""The kernels between the matmuls of prefill: norms, residual sums and activation functions, one program per
token.

The matmul takes float16. Rows with values outside its range are divided by a power of two, the row's *scale*,
and the matmul result is multiplied by it. This is exact; the scale is 1 for most models.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from edgeinfer_kernels.blocks.common.block import NormSpec
from edgeinfer_kernels.blocks.feed_forward import Activation
from edgeinfer_kernels.cuda.decode.step_norms import NextNorm
from edgeinfer_kernels.cuda.triton_ops.activations import activate, activate_gated, activation_code
from edgeinfer_kernels.cuda.triton_ops.kernel_args import NormArgs
from edgeinfer_kernels.cuda.triton_ops.norm_kernels import NO_NORM, NORMS, normed
from edgeinfer_kernels.cuda.tuning.step_shapes import next_power_of_two

LARGEST = tl.constexpr(30000.0)
"""Limit of a scaled row; float16 ends at 65504."""

PIECE = 2048


class NormRowsConfig(NamedTuple):
    """A residual sum and a norm of rows in a prompt, `block` columns at once; is_last: without the norm."""

    width: int
    block: int
    has_y_bias: bool
    post_norm: int
    norm: int
    has_bias: bool
    is_last: bool


@dataclass(frozen=True)
class ScaledRows:
    """Rows with a scale each: the value is rows · scales."""

    rows: torch.Tensor
    scales: torch.Tensor


@triton.jit
def row_scale(largest):
    """The power of two above largest/30000, so that largest over it is below 30000; 1 if no scale is
    needed.
    """
    exponent = ((largest / LARGEST).to(tl.int32, bitcast=True) >> 23) + 1
    scale = (tl.minimum(exponent, 254) << 23).to(tl.float32, bitcast=True)
    return tl.where(largest > LARGEST, scale, 1.0)


@triton.jit
def store_scaled(out, row_scales, row, y, offsets, mask, WIDTH: tl.constexpr):
    """out of a row = y / row scale, float16."""
    scale = row_scale(tl.max(tl.abs(y), axis=0))
    tl.store(row_scales + row, scale)
    tl.store(out + row * WIDTH + offsets, (y / scale).to(tl.float16), mask=mask)


@triton.jit
def norm_rows_kernel(
    x_rows,
    weight,
    bias,
    out,
    row_scales,
    epsilon,
    stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    NORM: tl.constexpr,
    BIAS: tl.constexpr,
):
    """out = norm(x) / row scale, for rows `stride` elements apart. Reads WIDTH · 4 bytes per row, of float16
    WIDTH · 2 (weights come from cache), writes WIDTH · 2.
    """
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < WIDTH
    x = tl.load(x_rows + row * stride + offsets, mask=mask, other=0.0).to(tl.float32)
    y = normed(x, mask, weight, bias, offsets, epsilon, WIDTH, NORM, BIAS)
    store_scaled(out, row_scales, row, y, offsets, mask, WIDTH)


@triton.jit
def add_norm_rows_kernel(
    x_rows,
    y_rows,
    y_scales,
    y_bias,
    post_weight,
    weight,
    bias,
    out,
    row_scales,
    post_epsilon,
    epsilon,
    residual_scale,
    ROWS: tl.constexpr,
):
    """x += residual scale · post norm(row scale · y + bias); then out = norm(x) / row scale, unless
    ROWS.is_last.

    Reads width · 8 bytes per row, writes width · 6.
    """
    WIDTH: tl.constexpr = ROWS.width
    row = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, ROWS.block)
    mask = offsets < WIDTH
    y = tl.load(y_rows + row * WIDTH + offsets, mask=mask, other=0.0).to(tl.float32) * tl.load(y_scales + row)
    if ROWS.has_y_bias:
        y += tl.load(y_bias + offsets, mask=mask, other=0.0)
    y = normed(y, mask, post_weight, post_weight, offsets, post_epsilon, WIDTH, ROWS.post_norm, False)
    x = tl.load(x_rows + row * WIDTH + offsets, mask=mask, other=0.0) + residual_scale * y
    tl.debug_barrier()  # As in `residual_kernel`.
    tl.store(x_rows + row * WIDTH + offsets, x, mask=mask)
    if not ROWS.is_last:
        z = normed(x, mask, weight, bias, offsets, epsilon, WIDTH, ROWS.norm, ROWS.has_bias)
        store_scaled(out, row_scales, row, z, offsets, mask, WIDTH)


@triton.jit
def store_scaled_pieces(
    out, row_scales, row, piece: tl.constexpr, args, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """out of a row = piece(offsets, mask, *args) / row scale, float16, in pieces of BLOCK.

    Written with scale 1 first; a row that needs another scale is computed again. `args` must be a tuple in
    the call: a variable would turn its compile-time elements into tensors.
    """
    to = out + row * WIDTH
    largest = tl.zeros((BLOCK,), tl.float32)
    for first in range(0, WIDTH, BLOCK):
        offsets = first + tl.arange(0, BLOCK)
        mask = offsets < WIDTH
        y = piece(offsets, mask, *args)
        largest = tl.maximum(largest, tl.where(mask, tl.abs(y), 0.0))
        tl.store(to + offsets, y.to(tl.float16), mask=mask)
    scale = row_scale(tl.max(largest, axis=0))
    tl.store(row_scales + row, scale)
    if scale > 1.0:
        for first in range(0, WIDTH, BLOCK):
            offsets = first + tl.arange(0, BLOCK)
            mask = offsets < WIDTH
            tl.store(to + offsets, (piece(offsets, mask, *args) / scale).to(tl.float16), mask=mask)


@triton.jit
def _hidden_piece(
    offsets, mask, gate, up, gate_bias, up_bias, scale,
    ACTIVATION: tl.constexpr, GATED: tl.constexpr, GATE_BIAS: tl.constexpr, UP_BIAS: tl.constexpr,
):  # fmt: skip
    u = tl.load(up + offsets, mask=mask, other=0.0).to(tl.float32) * scale
    if UP_BIAS:
        u += tl.load(up_bias + offsets, mask=mask, other=0.0)
    if GATED:
        g = tl.load(gate + offsets, mask=mask, other=0.0).to(tl.float32) * scale
        if GATE_BIAS:
            g += tl.load(gate_bias + offsets, mask=mask, other=0.0)
        return activate_gated(g, u, ACTIVATION)
    else:
        return activate(u, ACTIVATION)


@triton.jit
def activation_rows_kernel(
    gate_rows,
    up_rows,
    gate_bias,
    up_bias,
    in_scales,
    out,
    row_scales,
    row_stride,
    WIDTH: tl.constexpr,
    BLOCK: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATED: tl.constexpr,
    GATE_BIAS: tl.constexpr,
    UP_BIAS: tl.constexpr,
):
    """out = activation(gate · s + bias) · (up · s + bias) / row scale, in pieces of BLOCK.

    Reads WIDTH · 8 bytes per row (4 without a gate), twice if it needs a scale; writes WIDTH · 2.
    """
    row = tl.program_id(0).to(tl.int64)
    gate, up, in_scale = gate_rows + row * row_stride, up_rows + row * row_stride, tl.load(in_scales + row)
    store_scaled_pieces(
        out, row_scales, row, _hidden_piece,
        (gate, up, gate_bias, up_bias, in_scale, ACTIVATION, GATED, GATE_BIAS, UP_BIAS), WIDTH, BLOCK,
    )  # fmt: skip


@triton.jit
def activation_norm_rows_kernel(
    gate_rows, up_rows, gate_bias, up_bias, in_scales, norm, out, row_scales, row_stride,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ACTIVATION: tl.constexpr, GATED: tl.constexpr,
    GATE_BIAS: tl.constexpr, UP_BIAS: tl.constexpr, NORM: tl.constexpr,
):  # fmt: skip
    """out = norm(activation(gate · s + bias) · (up · s + bias)) / row scale, a whole row at once.

    Reads WIDTH · 8 bytes per row (4 without a gate), writes WIDTH · 2.
    """
    row = tl.program_id(0).to(tl.int64)
    gate, up, scale = gate_rows + row * row_stride, up_rows + row * row_stride, tl.load(in_scales + row)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < WIDTH
    y = _hidden_piece(
        offsets, mask, gate, up, gate_bias, up_bias, scale, ACTIVATION, GATED, GATE_BIAS, UP_BIAS
    )
    y = normed(y, mask, norm.weight, norm.weight, offsets, norm.epsilon, WIDTH, NORM, False)
    store_scaled(out, row_scales, row, y, offsets, mask, WIDTH)


def warps_for(block: int) -> int:
    """Warps of a program that holds `block` float32 of a row: at most 32 per thread."""
    return min(16, max(1, block // 1024))


def norm_rows(
    x: torch.Tensor,
    norm: NormSpec,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor,
    row_scales: torch.Tensor,
) -> None:
    """out (tokens, width) float16 = norm of x (tokens, width) float32 or float16 / row_scales (tokens,).

    Without a weight, x is not normalized.
    """
    tokens, width = x.shape
    block = next_power_of_two(width)
    norm_rows_kernel[(tokens,)](
        x, weight, bias, out, row_scales, norm.epsilon, x.stride(0),
        WIDTH=width, BLOCK=block, NORM=_kind(norm, weight), BIAS=bias is not None, num_warps=warps_for(block),
    )  # fmt: skip


def scale_rows(x: torch.Tensor, out: torch.Tensor, row_scales: torch.Tensor) -> None:
    """out (tokens, width) float16 = x (tokens, width) float32 / row_scales (tokens,)."""
    norm_rows(x, NormSpec("rms", 0.0), None, None, out, row_scales)


def add_norm_rows(
    x: torch.Tensor,
    y: ScaledRows,
    y_bias: torch.Tensor | None,
    post_norm: NextNorm,
    residual_scale: float,
    norm: NextNorm,
    out: ScaledRows | None,
) -> None:
    """x (tokens, width) float32 += residual_scale · post_norm(y + y_bias); then `norm_rows` of it.

    y is a matmul result (tokens, width), float32 or float16, with its scales. `out` None: only x is updated.
    """
    tokens, width = x.shape
    block = next_power_of_two(width)
    rows = NormRowsConfig(
        width, block, y_bias is not None, _kind(post_norm.spec, post_norm.weight),
        _kind(norm.spec, norm.weight), norm.bias is not None, out is None,
    )  # fmt: skip
    add_norm_rows_kernel[(tokens,)](
        x, y.rows, y.scales, y_bias, post_norm.weight, norm.weight, norm.bias, out and out.rows,
        out and out.scales, post_norm.spec.epsilon, norm.spec.epsilon, residual_scale,
        ROWS=rows, num_warps=warps_for(block),
    )  # fmt: skip


def activation_rows(
    gate: torch.Tensor | None,
    up: torch.Tensor,
    gate_bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    in_scales: torch.Tensor,
    activation: Activation,
    out: torch.Tensor,
    row_scales: torch.Tensor,
) -> None:
    """out (tokens, width) float16 = activation(gate) · up / row_scales; without a gate: activation(up) /
    row_scales.

    gate and up (tokens, width) are matmul results, float32 or float16, that are still to be multiplied by
    in_scales (tokens,). They may be views of one result if both have the same row stride.
    """
    tokens, width = up.shape
    if gate is not None and gate.stride(0) != up.stride(0):
        raise ValueError(f"gate and up: rows {gate.stride(0)} and {up.stride(0)} apart, wanted one distance")
    activation_rows_kernel[(tokens,)](
        up if gate is None else gate, up, gate_bias, up_bias, in_scales, out, row_scales, up.stride(0),
        WIDTH=width, BLOCK=min(PIECE, next_power_of_two(width)), ACTIVATION=activation_code(activation),
        GATED=gate is not None, GATE_BIAS=gate_bias is not None, UP_BIAS=up_bias is not None, num_warps=8,
    )  # fmt: skip


def activation_norm_rows(
    gate: torch.Tensor | None,
    up: torch.Tensor,
    gate_bias: torch.Tensor | None,
    up_bias: torch.Tensor | None,
    in_scales: torch.Tensor,
    activation: Activation,
    norm: NextNorm,
    out: ScaledRows,
) -> None:
    """As `activation_rows`, with a norm of the results; the rows of gate and up are contiguous."""
    tokens, width = up.shape
    block = next_power_of_two(width)
    activation_norm_rows_kernel[(tokens,)](
        up if gate is None else gate, up, gate_bias, up_bias, in_scales,
        NormArgs(norm.weight, None, norm.spec.epsilon), out.rows, out.scales, width,
        WIDTH=width, BLOCK=block, ACTIVATION=activation_code(activation), GATED=gate is not None,
        GATE_BIAS=gate_bias is not None, UP_BIAS=up_bias is not None, NORM=_kind(norm.spec, norm.weight),
        num_warps=warps_for(block),
    )  # fmt: skip


def _kind(norm: NormSpec, weight: torch.Tensor | None) -> int:
    return int(NO_NORM if weight is None else NORMS[norm.kind])
