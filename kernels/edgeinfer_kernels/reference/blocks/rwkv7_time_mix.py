"""The time mixing of RWKV-7 in numpy."""

import numpy as np

from edgeinfer_kernels.blocks.common.block import NormSpec
from edgeinfer_kernels.blocks.rwkv7_time_mix import MIXED, Rwkv7TimeMixSpec
from edgeinfer_kernels.caches.layer_cache import padded
from edgeinfer_kernels.reference.step import Array, BlockStep, normalize, sigmoid


def forward(step: BlockStep, h: Array) -> Array:
    """(tokens, hidden_size): W_out (o · g), where o are the results of the heads."""
    spec, w, state = step.spec, step.weights, step.state
    before = state.before(step.recurrent, step.start)[-1:, : spec.width]
    shifted = np.concatenate([before.astype(step.dtype), h[:-1]])
    mixed = {name: h + lerp * (shifted - h) for name, lerp in zip(MIXED, w.lerp, strict=True)}
    decay, rate = _rates(step, mixed)
    r, k = step.times(mixed["r"], w.receptance), step.times(mixed["k"], w.key)
    v = step.times(mixed["v"], w.value)
    if spec.is_first:
        step.shared["first_value"] = v
    else:
        share = sigmoid(w.v0 + step.times(step.times(mixed["v"], w.v1), w.v2))
        v = v + (step.shared["first_value"] - v) * share
    removed = _heads(k * w.k_k, spec)
    removed = removed / np.maximum(np.sqrt(np.sum(removed**2, axis=-1, keepdims=True)), 1e-12)
    k = k + k * w.k_a * (rate - 1)
    flat = removed.reshape(h.shape)
    rows = np.zeros((len(h), 6 * padded(spec.width)), h.dtype)
    for index, part in enumerate((h, decay, k, v, flat, flat * rate)):
        rows[:, index * padded(spec.width) :][:, : spec.width] = part
    out = _recurrence(step, rows, _heads(r, spec))
    normed = normalize(out, NormSpec("layer", spec.head_epsilon), np.ones(spec.head_dim, np.float32))
    o = normed.reshape(h.shape) * w.norm + w.norm_bias
    bonus = np.sum(_heads(r * k * w.r_k, spec), axis=-1, keepdims=True)
    o = o + (bonus * _heads(v, spec)).reshape(h.shape)
    gate = step.times(sigmoid(step.times(mixed["g"], w.g1)), w.g2)
    return step.times(o * gate, w.output)


def _rates(step: BlockStep, mixed: dict[str, Array]) -> tuple[Array, Array]:
    """The decay w, and a."""
    w = step.weights
    decay = w.w0 + step.times(np.tanh(step.times(mixed["w"], w.w1)), w.w2)
    rate = sigmoid(w.a0 + step.times(step.times(mixed["a"], w.a1), w.a2))
    return np.exp(-np.exp(-0.5) * sigmoid(decay)), rate


def _recurrence(step: BlockStep, rows: Array, r: Array) -> Array:
    """S r (tokens, heads, head_dim); the state is written."""
    spec, state = step.spec, step.state
    pending = state.pending_rows(step.recurrent, step.start).astype(step.dtype)
    every = np.concatenate([pending, rows]).reshape(-1, 6, padded(spec.width))[:, 1:, : spec.width]
    matrix = _unpacked(state.matrix(step.recurrent, step.start), spec).astype(step.dtype)
    out = np.empty_like(r)
    for index, row in enumerate(every):
        decay, k, v, removed, added = (part.reshape(spec.heads, spec.head_dim) for part in row)
        found = np.einsum("hij,hj->hi", matrix, removed)
        matrix = matrix * decay[:, None] - found[:, :, None] * added[:, None] + v[:, :, None] * k[:, None]
        if index >= len(pending):
            token = index - len(pending)
            out[token] = np.einsum("hij,hj->hi", matrix, r[token])
    state.write(step.recurrent, step.start, rows, _packed(matrix, spec))
    return out


def _heads(x: Array, spec: Rwkv7TimeMixSpec) -> Array:
    return x.reshape(len(x), spec.heads, spec.head_dim)


def _unpacked(matrix: Array, spec: Rwkv7TimeMixSpec) -> Array:
    """The state (heads, head_dim, head_dim) from its layout in a slot."""
    heads, dim = spec.heads, spec.head_dim
    return matrix.reshape(heads, dim // 16, dim, 16).swapaxes(2, 3).reshape(heads, dim, dim)


def _packed(matrix: Array, spec: Rwkv7TimeMixSpec) -> Array:
    """The inverse of `_unpacked`."""
    heads, dim = spec.heads, spec.head_dim
    return matrix.reshape(heads, dim // 16, 16, dim).swapaxes(2, 3)
