"""Prefill: chunks of tokens through float16 matmul with dequantized weights.

Every matrix is dequantized, slice by slice, into a scratch buffer that the library matmul reads. For hundreds
of tokens this is faster than matmul with packed weights. Activations are float16 with a scale per row to
avoid overflow; sums and hidden states are float32.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from edgeinfer_kernels.cuda.cache.host_caches import HostCaches
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.offload.cpu_stages import PrefillExchange, PromptTurn
from edgeinfer_kernels.cuda.offload.device_experts import DeviceExperts, DeviceFeedForward
from edgeinfer_kernels.cuda.offload.streamed_layers import PromptLayer, StreamedLayers, device_layers
from edgeinfer_kernels.cuda.offload.streamed_matrix import StreamedMatrix
from edgeinfer_kernels.cuda.prefill.flash_attention import AttentionTile, attention_tile, flash_attention
from edgeinfer_kernels.cuda.prefill.prefill_experts import PrefillExperts
from edgeinfer_kernels.cuda.prefill.prefill_matmul import Products
from edgeinfer_kernels.cuda.prefill.prefill_rope import rope_append
from edgeinfer_kernels.cuda.prefill.prefill_rows import ScaledRows, join_rows, norm_rows
from edgeinfer_kernels.cuda.triton_ops.embedding_kernels import embed_rows_kernel
from edgeinfer_kernels.cuda.weights.device_layers import DeviceAttention, DeviceCache
from edgeinfer_kernels.cuda.weights.device_model import DeviceModel
from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from edgeinfer_kernels.specification import AttentionSpecification, ExpertsSpecification, NormSpecification


class Prefill:
    """Evaluates chunks of at most `chunk` tokens through the layers; the buffers come from the arena."""

    def __init__(
        self, model: DeviceModel, arena: Arena, chunk: int, capability: int, sizes: ModelSizes
    ) -> None:
        """`sizes`: of the whole decoder, of which `model` may be a part."""
        self.model = model
        self.sent: StreamedLayers | None = None
        """All layers, if the CPU's weights can be streamed."""
        self.turns: PrefillExchange | None = None
        """The CPU stages of a split model."""
        self.chunk = chunk
        self._capability = capability
        facts = model.specification
        heads = max(layer.heads * layer.head_dim for layer in sizes.layers)
        self.ids = arena.take((chunk,), torch.int32)
        self.x = arena.take((chunk, facts.width), torch.float32)
        self._h = arena.take((chunk * facts.width,), torch.float16)
        self._queries = arena.take((chunk * heads,), torch.float16)
        self._mixed = arena.take((chunk * heads,), torch.float16)
        self._h_scales = arena.take((chunk,), torch.float32)
        self._ones = arena.take((chunk,), torch.float32)
        self.products = Products(sizes, arena, chunk)
        self._experts = PrefillExperts(facts, self.products, arena, capability)
        self._layers = device_layers(model)

    def read(self, tokens: int, start: int) -> Tensor:
        """Evaluate the first `tokens` of `ids` at positions start…; return x (tokens, hidden_size) after the
        last layer.

        In a split model the first hidden states come from the host. It then runs its CPU stages, or its
        weights are streamed to the GPU if there are enough tokens.
        """
        x = self.x[:tokens]
        self._ones.fill_(1.0)
        sent = self.sent if self.sent and tokens >= self.sent.least_tokens else None
        turns = None if sent else self.turns
        if sent:
            sent.sender.begin()
        if self.turns is None:
            self._embed(x)
        elif turns is None:
            self.turns.fetch(x)
        else:
            turns.receive(1, x, start)
        h = ScaledRows(self._h[: x.numel()].view(x.shape), self._h_scales[:tokens])
        chunk = _Chunk(x, h, start, sent.layers if sent else self._layers, turns)
        self._norm(chunk, -1)
        for place, layer in enumerate(chunk.layers):
            second = layer.second
            if isinstance(second, DeviceExperts):
                self._experts.route_early(layer.facts.feed_forward, second, x)
            self._attention(chunk, layer)
            if isinstance(second, DeviceExperts):
                self._mixture(chunk, place, second)
            else:
                self._feed_forward(chunk, place, second)
            turn = turns.turns.behind[place] if turns else 0
            if turns and turn:
                turns.send(x)
                turns.receive(turn, x, start)
                self._norm(chunk, place)
        return x

    def _norm(self, chunk: "_Chunk", place: int) -> None:
        """Apply to x the norm that follows the layer at `place`."""
        norm, weight, bias, last = self._following(chunk, place)
        if not last:
            norm_rows(chunk.x, norm, weight, bias, chunk.h.rows, chunk.h.scales)

    def _embed(self, x: Tensor) -> None:
        facts, embedding = self.model.specification, self.model.embedding
        embed_rows_kernel[(-(-facts.width // 256), len(x))](
            embedding.parts,
            self.ids,
            x,
            facts.embedding_scale,
            WIDTH=facts.width,
            BLOCKS=embedding.shapes.blocks,
            TILE=embedding.shapes.tile,
        )

    def _attention(self, chunk: "_Chunk", layer: PromptLayer) -> None:
        facts, w, x, h, start = layer.facts.attention, layer.attention, chunk.x, chunk.h, chunk.start
        tokens, heads = len(x), facts.heads * facts.head_dim
        qkv = self._stacked(w, facts, h)
        queries = self._queries[: tokens * heads].view(tokens, facts.heads, facts.head_dim)
        cache = layer.cache or self._caches.fetch(layer.index, start)
        key_scales, value_scales = cache.scales
        rope_append(
            qkv, h.scales, w.qkv_bias, w.q_norm, w.k_norm, w.table, facts, start, queries,
            cache.keys, cache.values, key_scales, value_scales,
        )  # fmt: skip
        mixed = self._mixed[: tokens * heads].view(tokens, heads)
        flash_attention(
            queries, cache.keys, cache.values, start, facts, mixed, self._tile(facts, cache), key_scales,
            value_scales, w.sinks,
        )  # fmt: skip
        if layer.cache is None:
            self._caches.put_back(layer.index, cache, start, tokens)
        y = self.products.product(mixed, w.output)
        norm = layer.norm
        join_rows(
            x, y, self._ones[:tokens], w.output_bias, facts.norm, w.post_norm, facts.residual_scale,
            layer.facts.feed_forward.norm, norm and norm.norm, norm and norm.norm_bias, h.rows, h.scales,
        )  # fmt: skip

    @property
    def _caches(self) -> HostCaches:
        assert self.sent is not None, "only what is sent is attended to without a cache here"
        return self.sent.caches

    def _tile(self, facts: AttentionSpecification, cache: DeviceCache) -> AttentionTile:
        group, quantized = facts.heads // facts.kv_heads, cache.keys.dtype != torch.float16
        return attention_tile(facts.head_dim, group, self._capability, quantized)

    def _stacked(self, w: DeviceAttention, facts: AttentionSpecification, h: ScaledRows) -> Tensor:
        """q, k and v of all tokens side by side, (tokens, rows) float32."""
        rows = (facts.heads + 2 * facts.kv_heads) * facts.head_dim
        out = self.products.floats(len(h.rows), rows)
        first = 0
        for part in w.qkv.parts:
            product = out[:, first : first + part.shapes.rows]
            self.products.multiply(h.rows, part, product)
            if isinstance(part, StreamedMatrix) and part.order is not None:
                heads = product.unflatten(1, (-1, facts.head_dim))
                heads.copy_(heads.index_select(2, part.order))
            first += part.shapes.rows
        return out

    def _feed_forward(self, chunk: "_Chunk", place: int, parts: Sequence[DeviceFeedForward]) -> None:
        """Compute the parts of a dense feed-forward in sequence, including the CPU stage if it has one."""
        facts, x, h, turn = chunk.layers[place].facts.feed_forward, chunk.x, chunk.h, chunk.turn_within(place)
        if turn:
            turn.send(x)
        for part in parts[:-1]:
            y, scales = self.products.dense(facts.activation, part, h)
            join_rows(
                x, y, scales, part.down_bias, facts.norm, None, facts.residual_scale,
                facts.norm, None, None, None, None,
            )  # fmt: skip
        if parts:
            y, scales = self.products.dense(facts.activation, parts[-1], h)
        if turn:
            turn.receive(x, chunk.start)
        if not parts:
            self._norm(chunk, place)
            return
        norm, weight, bias, last = self._following(chunk, place)
        join_rows(
            x, y, scales, parts[-1].down_bias, facts.norm, parts[-1].post_norm, facts.residual_scale,
            norm, weight, bias, None if last else h.rows, None if last else h.scales,
        )  # fmt: skip

    def _mixture(self, chunk: "_Chunk", place: int, w: DeviceExperts) -> None:
        layer, x, h, turn = chunk.layers[place], chunk.x, chunk.h, chunk.turn_within(place)
        facts = layer.facts.feed_forward
        assert isinstance(facts, ExpertsSpecification)
        y = self._experts.read(facts, w, h, layer.sent, partial(turn.send, x) if turn else None)
        if turn:
            turn.receive(x, chunk.start)
        norm, weight, bias, last = self._following(chunk, place)
        join_rows(
            x, y, self._ones[: len(x)], None, facts.norm, None, facts.residual_scale,
            norm, weight, bias, None if last else h.rows, None if last else h.scales,
        )  # fmt: skip

    def _following(
        self, chunk: "_Chunk", place: int
    ) -> tuple[NormSpecification, Tensor | None, Tensor | None, bool]:
        """The norm after the layer at `place`, and whether it is the last layer."""
        if place + 1 == len(chunk.layers):
            return self.model.specification.norm, None, None, True
        layer = chunk.layers[place + 1]
        return layer.facts.attention.norm, layer.attention.norm, layer.attention.norm_bias, False


@dataclass(frozen=True)
class _Chunk:
    """State of a chunk of tokens: hidden states, normed hidden states, first position, and its layers."""

    x: Tensor
    h: ScaledRows
    start: int
    layers: Sequence[PromptLayer]
    turns: PrefillExchange | None

    def turn_within(self, place: int) -> PromptTurn | None:
        """The CPU stage in a layer's feed-forward."""
        turn = self.turns.turns.within[place] if self.turns else 0
        return PromptTurn(self.turns, turn) if self.turns and turn else None
