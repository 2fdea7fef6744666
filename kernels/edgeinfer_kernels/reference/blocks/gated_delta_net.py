"""Gated delta net in numpy."""

import numpy as np

from edgeinfer_kernels.blocks.gated_delta_net import GatedDeltaNetSpec
from edgeinfer_kernels.blocks.kimi_delta_attention import KimiDeltaAttentionSpec
from edgeinfer_kernels.caches.layer_cache import padded
from edgeinfer_kernels.reference.step import Array, BlockStep, normalize, sigmoid, silu, softplus

DeltaRuleSpec = GatedDeltaNetSpec | KimiDeltaAttentionSpec


def forward(step: BlockStep, h: Array) -> Array:
    """(tokens, hidden_size): W_out (norm(o) · silu(W_z h)), where o are the results of the value heads."""
    w = step.weights
    beta = sigmoid(step.times(h, w.beta))
    g = w.a * softplus(step.times(h, w.alpha) + w.dt)
    out = delta_rule(step, step.times(h, w.qkv), beta, g)
    normed = normalize(out, step.spec.norm, w.norm).reshape(len(h), -1)
    return step.times(normed * silu(step.times(h, w.z)), w.output)


def delta_rule(step: BlockStep, qkv: Array, beta: Array, g: Array) -> Array:
    """(tokens, value_heads, head_dim): the results of the value heads. The state is written.

    qkv: q, k and v before the convolution. g: the logarithm of the decay, of each value head or of each of
    its key elements.
    """
    spec, state = step.spec, step.state
    width, heads, count = padded(spec.channels), padded(spec.value_heads), g.shape[1]
    rows = np.zeros((len(qkv), spec.recurrent.row_width), qkv.dtype)
    for part, first in ((qkv, 0), (beta, width), (g, width + heads)):
        rows[:, first : first + part.shape[1]] = part
    pending = state.pending_rows(step.recurrent, step.start).astype(step.dtype)
    history = np.concatenate([state.before(step.recurrent, step.start), rows[:, :width]])[:, : spec.channels]
    q, k, v = _heads(history.astype(step.dtype), spec, step.weights.taps)
    every = np.concatenate([pending, rows])
    betas = every[:, width : width + spec.value_heads]
    decays = np.exp(every[:, width + heads : width + heads + count])
    decays = decays.reshape(len(every), spec.value_heads, -1, 1)
    matrix = _columns(state.matrix(step.recurrent, step.start), spec).astype(step.dtype)
    out = np.empty((len(every), spec.value_heads, spec.head_dim), qkv.dtype)
    for token in range(len(every)):
        matrix *= decays[token]
        delta = betas[token][:, None] * (v[token] - np.einsum("hkv,hk->hv", matrix, k[token]))
        matrix += k[token][:, :, None] * delta[:, None, :]
        out[token] = np.einsum("hkv,hk->hv", matrix, q[token])
    state.write(step.recurrent, step.start, rows, _packed(matrix, spec))
    return out[len(pending) :]


def _heads(history: Array, spec: DeltaRuleSpec, taps: Array) -> tuple[Array, Array, Array]:
    """q, k and v (positions, value_heads, head_dim) after the convolution; q and k of each value head."""
    count, dim = len(history) - spec.taps + 1, spec.head_dim
    conv = silu(sum(taps[tap] * history[tap : tap + count] for tap in range(spec.taps)))
    values_at = 2 * spec.key_heads * dim
    qk = conv[:, :values_at].reshape(count, 2, spec.key_heads, dim)
    qk = qk / np.sqrt(np.sum(qk * qk, axis=-1, keepdims=True) + spec.norm.epsilon)
    of_head = [spec.key_head(head) for head in range(spec.value_heads)]
    q, k = qk[:, 0, of_head], qk[:, 1, of_head]
    return q / np.sqrt(dim), k, conv[:, values_at:].reshape(count, spec.value_heads, dim)


def _columns(matrix: Array, spec: DeltaRuleSpec) -> Array:
    """The state (value_heads, head_dim, head_dim) from its layout in a slot."""
    heads, dim = spec.value_heads, spec.head_dim
    return matrix.reshape(heads, -1, dim, 16).swapaxes(1, 2).reshape(heads, dim, -1)[:, :, :dim]


def _packed(matrix: Array, spec: DeltaRuleSpec) -> Array:
    """The inverse of `_columns`."""
    heads, dim = spec.value_heads, spec.head_dim
    wide = np.pad(matrix, ((0, 0), (0, 0), (0, padded(dim) - dim)))
    return wide.reshape(heads, dim, -1, 16).swapaxes(1, 2)
