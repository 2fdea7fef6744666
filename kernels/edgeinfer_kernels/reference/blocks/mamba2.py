"""Mamba-2 in numpy."""

import numpy as np

from edgeinfer_kernels.blocks.mamba2 import Mamba2Spec
from edgeinfer_kernels.caches.layer_cache import padded
from edgeinfer_kernels.reference.step import Array, BlockStep, normalize, silu, softplus


def forward(step: BlockStep, h: Array) -> Array:
    """(tokens, hidden_size): W_out norm(y · silu(z)), where y are the results of the heads."""
    spec, w, state = step.spec, step.weights, step.state
    width, heads = padded(spec.channels), spec.heads
    rows = np.zeros((len(h), width + padded(heads)), h.dtype)
    rows[:, : spec.channels] = step.times(h, w.xbc)
    rows[:, width : width + heads] = softplus(step.times(h, w.dt) + w.dt_bias)
    pending = state.pending_rows(step.recurrent, step.start).astype(step.dtype)
    history = np.concatenate([state.before(step.recurrent, step.start), rows[:, :width]])[:, : spec.channels]
    x, b, c = _heads(history.astype(step.dtype), spec, w.taps, w.taps_bias)
    dt = np.concatenate([pending, rows])[:, width : width + heads]
    matrix = _columns(state.matrix(step.recurrent, step.start), spec).astype(step.dtype)
    y = np.empty((len(dt), heads, spec.head_dim), h.dtype)
    for token in range(len(dt)):
        matrix *= np.exp(dt[token] * w.a)[:, None, None]
        matrix += b[token][:, :, None] * (dt[token][:, None] * x[token])[:, None, :]
        y[token] = np.einsum("hnd,hn->hd", matrix, c[token]) + w.d[:, None] * x[token]
    state.write(
        step.recurrent, step.start, rows, matrix.reshape(heads, spec.state_size, -1, 16).swapaxes(1, 2)
    )
    gated = y[len(pending) :].reshape(len(h), -1) * silu(step.times(h, w.z))
    return step.times(_grouped_norm(gated, spec, w.norm), w.output)


def _grouped_norm(x: Array, spec: Mamba2Spec, weight: Array | None) -> Array:
    """The norm of each group of a row; without a weight x."""
    if weight is None:
        return x
    groups = x.reshape(len(x), spec.groups, -1)
    return normalize(groups, spec.norm, weight.reshape(spec.groups, -1)).reshape(x.shape)


def _heads(history: Array, spec: Mamba2Spec, taps: Array, bias: Array | None) -> tuple[Array, Array, Array]:
    """x (positions, heads, head_dim), B and C (positions, heads, state_size) after the convolution."""
    count, inner = len(history) - spec.taps + 1, spec.inner_size
    total = sum(taps[tap] * history[tap : tap + count] for tap in range(spec.taps))
    conv = silu(total if bias is None else total + bias)
    bc = conv[:, inner:].reshape(count, 2, spec.groups, spec.state_size)
    bc = np.repeat(bc, spec.heads // spec.groups, axis=2)
    return conv[:, :inner].reshape(count, spec.heads, spec.head_dim), bc[:, 0], bc[:, 1]


def _columns(matrix: Array, spec: Mamba2Spec) -> Array:
    """The state (heads, state_size, head_dim) from its layout in a slot."""
    parts = matrix.reshape(spec.heads, -1, spec.state_size, 16).swapaxes(1, 2)
    return parts.reshape(spec.heads, spec.state_size, spec.head_dim)


def _packed(matrix: Array, spec: Mamba2Spec) -> Array:
    """The inverse of `_columns`."""
    return matrix.reshape(spec.heads, spec.state_size, -1, 16).swapaxes(1, 2)
