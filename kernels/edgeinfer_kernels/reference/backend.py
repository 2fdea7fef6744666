"""Every block as its formula, in numpy: slow, plain, and the truth in every kernel test.

Weights are decoded to float when they are needed and never rounded again. `dtype` float64 makes it an
evaluation that is exact for our purposes; the cache then stays in float64 as well unless a cache type is
asked for.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.backend import LayerCache
from edgeinfer_kernels.specification import (
    Activation,
    AttentionSpecification,
    DecoderSpecification,
    NormSpecification,
    RopeSpecification,
)
from edgeinfer_kernels.weights import AttentionWeights, DecoderWeights, Matrix, Vector

Array = npt.NDArray[np.floating]


def normalise(x: Array, norm: NormSpecification, weight: Vector | None, bias: Vector | None = None) -> Array:
    """The norm over the last axis; without a weight there is no norm and x comes back."""
    if weight is None:
        return x
    if norm.kind == "layer":
        x = x - x.mean(axis=-1, keepdims=True)
    y = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + norm.epsilon) * weight
    return np.asarray(y if bias is None else y + bias)


def activate(x: Array, activation: Activation) -> Array:
    """SiLU, GELU in its tanh form, ReLU, or ReLU squared."""
    if activation == "silu":
        return np.asarray(x / (1 + np.exp(-x)))
    if activation == "gelu":
        return np.asarray(0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))))
    positive = np.maximum(x, 0)
    return positive if activation == "relu" else positive * positive


def rotate(x: Array, rope: RopeSpecification | None, start: int) -> Array:
    """RoPE of x (tokens, heads, head_dim); dimensions beyond the rotated ones stay."""
    if rope is None:
        return x
    half = rope.dimensions // 2
    table = rope.table(start, len(x), x.dtype)[:, None, :]
    cosine, sine = table[..., :half], table[..., half:]
    y = x.copy()
    first, second = (
        (slice(0, half), slice(half, 2 * half))
        if rope.halves
        else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    )
    y[..., first] = x[..., first] * cosine - x[..., second] * sine
    y[..., second] = x[..., first] * sine + x[..., second] * cosine
    return y


def soft_cap(x: Array, cap: float) -> Array:
    return cap * np.tanh(x / cap) if cap else x


def attend(queries: Array, keys: Array, values: Array, start: int, facts: AttentionSpecification) -> Array:
    """Softmax attention of queries (tokens, heads, head_dim) over keys, values (kv_heads, positions,
    head_dim).
    """
    tokens, heads, _ = queries.shape
    group = heads // facts.kv_heads
    position = np.arange(keys.shape[1])
    asking = start + np.arange(tokens)[:, None]
    visible = position <= asking
    if facts.window:
        visible &= position > asking - facts.window
    mixed = np.empty_like(queries)
    for head in range(heads):
        scores = soft_cap(queries[:, head] @ keys[head // group].T * facts.scale, facts.soft_cap)
        scores = np.where(visible, scores, -np.inf)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        mixed[:, head] = weights / weights.sum(axis=1, keepdims=True) @ values[head // group]
    return mixed


class ReferenceBackend:
    """A decoder in numpy, on `caches` (one per layer) that it shares with whoever made them."""

    name = "reference"

    def __init__(
        self,
        specification: DecoderSpecification,
        weights: DecoderWeights,
        caches: Sequence[LayerCache],
        dtype: npt.DTypeLike = np.float32,
    ) -> None:
        self.specification = specification
        self.weights = weights
        self.caches = caches
        self.dtype = dtype

    def embed(self, ids: Sequence[int]) -> Array:
        rows = self.weights.token_embd.decoded_rows(np.asarray(ids))
        scale = np.asarray(self.specification.embedding_scale, self.dtype)
        return np.asarray(rows.astype(self.dtype) * scale)

    def _head(
        self, row: Array, facts: AttentionSpecification, bias: Vector | None, norm: Vector | None
    ) -> Array:
        """Projected rows to (tokens, heads, head_dim), with bias and q/k norm."""
        if bias is not None:
            row = row + bias
        if facts.qk_norm == "row":
            row = normalise(row, facts.norm, norm)
        heads = row.reshape(len(row), -1, facts.head_dim)
        return normalise(heads, facts.norm, norm) if facts.qk_norm == "head" else heads

    def attention_block(self, layer: int, x: Array, start: int) -> None:
        facts = self.specification.layers[layer].attention
        w: AttentionWeights = self.weights.layers[layer].attention
        cache = self.caches[layer]
        h = normalise(x, facts.norm, w.attn_norm, w.attn_norm_bias)
        q = self._head(self._times(h, w.attn_q), facts, w.attn_q_bias, w.attn_q_norm)
        k = self._head(self._times(h, w.attn_k), facts, w.attn_k_bias, w.attn_k_norm)
        v = self._times(h, w.attn_v) + (0 if w.attn_v_bias is None else w.attn_v_bias)
        cache.write(start, rotate(k, facts.rope, start), v.reshape(k.shape))
        keys, values = (seen.astype(self.dtype) for seen in cache.read(start + len(x), facts.head_dim))
        mixed = attend(rotate(q, facts.rope, start), keys, values, start, facts)
        y = self._times(mixed.reshape(len(x), -1), w.attn_output)
        if w.attn_output_bias is not None:
            y = y + w.attn_output_bias
        x += normalise(y, facts.norm, w.attn_post_norm) * facts.residual_scale

    def feed_forward_block(self, layer: int, x: Array) -> None:
        facts = self.specification.layers[layer].feed_forward
        w = self.weights.layers[layer].feed_forward
        h = normalise(x, facts.norm, w.ffn_norm, w.ffn_norm_bias)
        up = self._times(h, w.ffn_up) + (0 if w.ffn_up_bias is None else w.ffn_up_bias)
        if w.ffn_gate is None:
            hidden = activate(up, facts.activation)
        else:
            gate = self._times(h, w.ffn_gate) + (0 if w.ffn_gate_bias is None else w.ffn_gate_bias)
            hidden = activate(gate, facts.activation) * up
        y = self._times(hidden, w.ffn_down) + (0 if w.ffn_down_bias is None else w.ffn_down_bias)
        x += normalise(y, facts.norm, w.ffn_post_norm) * facts.residual_scale

    def all_layers(self, x: Array, start: int) -> None:
        for layer in range(len(self.specification.layers)):
            self.attention_block(layer, x, start)
            self.feed_forward_block(layer, x)

    def logits(self, x: Array) -> npt.NDArray[np.float32]:
        facts = self.specification
        h = normalise(x, facts.norm, self.weights.output_norm, self.weights.output_norm_bias)
        raw = self._times(h, self.weights.output) * facts.logit_scale
        return soft_cap(raw, facts.logit_soft_cap)

    def _times(self, x: Array, matrix: Matrix) -> Array:
        return np.asarray(x @ matrix.decoded().astype(self.dtype).T)

    def close(self) -> None:
        """Nothing is held."""
