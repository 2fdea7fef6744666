"""Every block as its formula in numpy: slow and simple, the reference of every kernel test.

Weights are dequantized to float when needed and not rounded again. With `dtype` float64 the result is exact
for testing purposes; the cache is then float64 too unless a cache type is given.
"""

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.backend import Places
from edgeinfer_kernels.expert_routing import Routing
from edgeinfer_kernels.layer_cache import LayerCache
from edgeinfer_kernels.reference.routing import route
from edgeinfer_kernels.specification import (
    CLAMPED_SWIGLU_LIMIT,
    CLAMPED_SWIGLU_SLOPE,
    Activation,
    AttentionSpecification,
    DecoderSpecification,
    ExpertsSpecification,
    FeedForwardSpecification,
    NormSpecification,
    RopeSpecification,
)
from edgeinfer_kernels.weights import (
    AttentionWeights,
    DecoderWeights,
    ExpertWeights,
    FeedForwardWeights,
    Matrix,
    Vector,
)

Array = npt.NDArray[np.floating]


def normalize(x: Array, norm: NormSpecification, weight: Vector | None, bias: Vector | None = None) -> Array:
    """The norm over the last axis; without a weight, x is returned unchanged."""
    if weight is None:
        return x
    if norm.kind == "layer":
        x = x - x.mean(axis=-1, keepdims=True)
    y = x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + norm.epsilon) * weight
    return np.asarray(y if bias is None else y + bias)


def last_norm(specification: DecoderSpecification, weights: DecoderWeights, x: Array) -> Array:
    """The final norm before the head."""
    return normalize(x, specification.norm, weights.output_norm, weights.output_norm_bias)


def activate(x: Array, activation: Activation) -> Array:
    """SiLU, GELU in its tanh form, ReLU, or ReLU squared."""
    if activation == "silu":
        return np.asarray(x / (1 + np.exp(-x)))
    if activation == "gelu":
        return np.asarray(0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))))
    positive = np.maximum(x, 0)
    return positive if activation == "relu" else positive * positive


def activate_gated(gate: Array, up: Array, activation: Activation) -> Array:
    """activation(gate) · up; clamped SwiGLU as defined in `specification.Activation`."""
    if activation != "clamped_swiglu":
        return activate(gate, activation) * up
    gate = np.minimum(gate, CLAMPED_SWIGLU_LIMIT)
    up = np.clip(up, -CLAMPED_SWIGLU_LIMIT, CLAMPED_SWIGLU_LIMIT)
    return np.asarray(gate / (1 + np.exp(-CLAMPED_SWIGLU_SLOPE * gate)) * (up + 1))


def rotate(x: Array, rope: RopeSpecification | None, start: int) -> Array:
    """Apply RoPE to x (tokens, heads, head_dim); dimensions beyond the RoPE dimensions are unchanged."""
    if rope is None:
        return x
    return turn(x, rope, rope.table(start, len(x), x.dtype)[:, None, :])


def turn(x: Array, rope: RopeSpecification, table: Array) -> Array:
    """x (..., head_dim) with RoPE from a table of `rope` that broadcasts to the rows of x."""
    half = rope.dimensions // 2
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


def attend(
    queries: Array,
    keys: Array,
    values: Array,
    start: int,
    facts: AttentionSpecification,
    sinks: Vector | None = None,
) -> Array:
    """Softmax attention of queries (tokens, heads, head_dim) over keys, values (kv_heads, positions,
    head_dim); sinks (heads,) add one more score per head, without a value.
    """
    group = facts.heads // facts.kv_heads
    mixed = np.empty_like(queries)
    for head, weights in enumerate(attention_weights(queries, keys, start, facts, sinks)):
        mixed[:, head] = weights @ values[head // group]
    return mixed


def attention_weights(
    queries: Array, keys: Array, start: int, facts: AttentionSpecification, sinks: Vector | None = None
) -> Iterator[Array]:
    """The softmax weights of `attend`: (tokens, positions) for each head in order."""
    tokens, heads, _ = queries.shape
    group = heads // facts.kv_heads
    position = np.arange(keys.shape[1])
    asking = start + np.arange(tokens)[:, None]
    visible = position <= asking
    if facts.window:
        visible &= position > asking - facts.window
    for head in range(heads):
        scores = soft_cap(queries[:, head] @ keys[head // group].T * facts.scale, facts.soft_cap)
        scores = np.where(visible, scores, -np.inf)
        top = scores.max(axis=1, keepdims=True)
        sink = np.full_like(top, -np.inf) if sinks is None else np.full_like(top, sinks[head])
        top = np.maximum(top, sink)
        weights = np.exp(scores - top)
        total = weights.sum(axis=1, keepdims=True) + np.exp(sink - top)
        yield weights / total


class ReferenceBackend:
    """A decoder in numpy. `caches` (one per layer) are shared with the caller."""

    name = "reference"
    most_placed = 64

    def __init__(
        self,
        specification: DecoderSpecification,
        weights: DecoderWeights,
        caches: Sequence[LayerCache],
        dtype: npt.DTypeLike = np.float32,
        routing: Routing | None = None,
    ) -> None:
        self.specification = specification
        self.weights = weights
        self.caches = caches
        self.dtype = dtype
        self.routing = routing
        self._scores: Array | None = None
        self._places: Places | None = None

    def embed(self, ids: Sequence[int]) -> Array:
        rows = self.weights.token_embd.decoded_rows(np.asarray(ids))
        scale = np.asarray(self.specification.embedding_scale, self.dtype)
        return np.asarray(rows.astype(self.dtype) * scale)

    def _head(
        self, row: Array, facts: AttentionSpecification, bias: Vector | None, norm: Vector | None
    ) -> Array:
        """Projected rows reshaped to (tokens, heads, head_dim), with bias and q/k norm."""
        if bias is not None:
            row = row + bias
        if facts.qk_norm == "row":
            row = normalize(row, facts.norm, norm)
        heads = row.reshape(len(row), -1, facts.head_dim)
        return normalize(heads, facts.norm, norm) if facts.qk_norm == "head" else heads

    def attention_block(self, layer: int, x: Array, start: int) -> None:
        facts = self.specification.layers[layer].attention
        w: AttentionWeights = self.weights.layers[layer].attention
        cache = self.caches[layer]
        following = self.specification.layers[layer].feed_forward
        if isinstance(following, ExpertsSpecification) and following.early:
            experts = self.weights.layers[layer].feed_forward
            assert isinstance(experts, ExpertWeights)
            self._scores = self._times(x, experts.ffn_gate_inp)
        h = normalize(x, facts.norm, w.attn_norm, w.attn_norm_bias)
        q = self._head(self._times(h, w.attn_q), facts, w.attn_q_bias, w.attn_q_norm)
        k = self._head(self._times(h, w.attn_k), facts, w.attn_k_bias, w.attn_k_norm)
        v = self._times(h, w.attn_v) + (0 if w.attn_v_bias is None else w.attn_v_bias)
        v = v.reshape(k.shape)
        if self._places is None:
            cache.write(start, rotate(k, facts.rope, start), v)
            keys, values = (seen.astype(self.dtype) for seen in cache.read(start + len(x), facts.head_dim))
            mixed = attend(rotate(q, facts.rope, start), keys, values, start, facts, w.attn_sinks)
        else:
            mixed = self._attend_at(self._places, q, k, v, facts, cache, w.attn_sinks)
        y = self._times(mixed.reshape(len(x), -1), w.attn_output)
        if w.attn_output_bias is not None:
            y = y + w.attn_output_bias
        x += normalize(y, facts.norm, w.attn_post_norm) * facts.residual_scale

    def feed_forward_block(self, layer: int, x: Array) -> None:
        facts = self.specification.layers[layer].feed_forward
        w = self.weights.layers[layer].feed_forward
        if isinstance(facts, ExpertsSpecification):
            assert isinstance(w, ExpertWeights)
            self._experts(layer, x, facts, w)
            return
        assert isinstance(w, FeedForwardWeights)
        y = self._dense(normalize(x, facts.norm, w.ffn_norm, w.ffn_norm_bias), facts, w)
        x += normalize(y, facts.norm, w.ffn_post_norm) * facts.residual_scale

    def _dense(
        self, h: Array, facts: FeedForwardSpecification | ExpertsSpecification, w: FeedForwardWeights
    ) -> Array:
        up = self._biased(h, w.ffn_up, w.ffn_up_bias)
        if w.ffn_gate is None:
            hidden = activate(up, facts.activation)
        else:
            hidden = activate_gated(self._biased(h, w.ffn_gate, w.ffn_gate_bias), up, facts.activation)
        return self._biased(hidden, w.ffn_down, w.ffn_down_bias)

    def _experts(self, layer: int, x: Array, facts: ExpertsSpecification, w: ExpertWeights) -> None:
        h = normalize(x, facts.norm, w.ffn_norm)
        if not facts.early:
            self._scores = self._times(h, w.ffn_gate_inp)
        assert self._scores is not None
        scores = self._scores if w.ffn_gate_inp_bias is None else self._scores + w.ffn_gate_inp_bias
        chosen, weights = route(scores, facts)
        if self.routing is not None:
            self.routing.ids[layer, : len(x), : facts.used] = chosen
        y = np.zeros_like(x)
        for expert in np.unique(chosen):
            token, slot = np.nonzero(chosen == expert)
            y[token] += weights[token, slot, None] * self._dense(h[token], facts, w.expert(int(expert)))
        if w.shared is not None:
            shared = self._dense(h, facts, w.shared)
            if w.ffn_gate_inp_shexp is not None:
                shared = shared / (1 + np.exp(-h @ w.ffn_gate_inp_shexp))[:, None]
            y += shared
        x += y * facts.residual_scale

    def all_layers(self, x: Array, start: int) -> None:
        for layer in range(len(self.specification.layers)):
            self.attention_block(layer, x, start)
            self.feed_forward_block(layer, x)

    def some_layers(self, x: Array, start: int, layers: Sequence[int]) -> None:
        """Run both blocks of these layers."""
        for layer in layers:
            self.attention_block(layer, x, start)
            self.feed_forward_block(layer, x)

    def all_layers_at(self, x: Array, places: Places) -> None:
        """Run both blocks of every layer for tokens of several sequences."""
        self._places = places
        try:
            self.all_layers(x, 0)
        finally:
            self._places = None

    def _attend_at(
        self,
        places: Places,
        q: Array,
        k: Array,
        v: Array,
        facts: AttentionSpecification,
        cache: LayerCache,
        sinks: Vector | None,
    ) -> Array:
        """Attention token by token, each over its sequence; all keys and values are written first."""
        positions = [int(position) for position in places.positions]
        for token, position in enumerate(positions):
            key = rotate(k[token : token + 1], facts.rope, position)
            slots = [int(places.slots(token, position + 1)[-1]), *(places.copies or [()] * len(k))[token]]
            for slot in slots:
                cache.write(slot, key, v[token : token + 1])
        mixed = np.empty_like(q)
        for token, position in enumerate(positions):
            query = rotate(q[token : token + 1], facts.rope, position)
            slots_of = places.slots(token, position + 1)
            held = cache.read(cache.positions, facts.head_dim)
            keys, values = (seen[:, slots_of].astype(self.dtype) for seen in held)
            mixed[token] = attend(query, keys, values, position, facts, sinks)[0]
        return mixed

    def normed(self, x: Array) -> npt.NDArray[np.float32]:
        return last_norm(self.specification, self.weights, x).astype(np.float32)

    def logits(self, x: Array) -> npt.NDArray[np.float32]:
        facts = self.specification
        h = last_norm(facts, self.weights, x)
        raw = self._times(h, self.weights.output) * facts.logit_scale
        return soft_cap(raw, facts.logit_soft_cap)

    def _biased(self, x: Array, matrix: Matrix, bias: Vector | None) -> Array:
        y = self._times(x, matrix)
        return y if bias is None else np.asarray(y + bias)

    def _times(self, x: Array, matrix: Matrix) -> Array:
        return np.asarray(x @ matrix.decoded().astype(self.dtype).T)

    def close(self) -> None:
        """Does nothing: no resources are held."""
