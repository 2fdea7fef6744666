"""Reading a prompt: chunks of tokens through float16 products with dequantised weights.

Every matrix is dequantised, slice by slice, into a scratch that the library's matrix product then reads: on
hundreds of tokens that beats a product on packed weights. Activations are float16 under a scale a row, so
that none overflows; sums and the residual stream are float32.
"""

from functools import partial

import torch
from torch import Tensor

from edgeinfer_kernels.cuda.device_experts import DeviceExperts, DeviceFeedForward
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.device_model import DeviceAttention, DeviceLayer, DeviceModel
from edgeinfer_kernels.cuda.device_sizes import prompt_columns, prompt_hidden, prompt_scratch
from edgeinfer_kernels.cuda.embedding_kernels import dequantise_kernel, embed_rows_kernel
from edgeinfer_kernels.cuda.flash_attention import AttentionTile, attention_tile, flash_attention
from edgeinfer_kernels.cuda.host_turns import PromptTurns
from edgeinfer_kernels.cuda.packing import DeviceMatrix
from edgeinfer_kernels.cuda.plane_formats import BLOCK, padded_blocks
from edgeinfer_kernels.cuda.prefill_experts import FeedForwardSlice, PrefillExperts, ScaledRows
from edgeinfer_kernels.cuda.prefill_rope import rope_append
from edgeinfer_kernels.cuda.prefill_rows import activation_rows, join_rows, norm_rows
from edgeinfer_kernels.cuda.prefill_stream import PromptStream, StreamedFeedForward
from edgeinfer_kernels.model_sizes import ModelSizes
from edgeinfer_kernels.specification import (
    Activation,
    AttentionSpecification,
    ExpertsSpecification,
    FeedForwardSpecification,
    LayerSpecification,
    NormSpecification,
)

DEQUANTISED_BLOCKS = 64
"""Blocks of a row that a program dequantises."""


class Prefill:
    """Takes chunks of at most `chunk` tokens up the layers; the buffers come from the arena."""

    def __init__(
        self, model: DeviceModel, arena: Arena, chunk: int, capability: int, sizes: ModelSizes
    ) -> None:
        """`sizes`: of the whole decoder, of which `model` may be a part."""
        self.model = model
        self.stream: PromptStream | None = None
        """What of the host's is computed here."""
        self.turns: PromptTurns | None = None
        """Those of the host, in a divided model."""
        self.chunk = chunk
        self._capability = capability
        facts = model.specification
        width = facts.width
        heads = max(layer.attention.heads * layer.attention.head_dim for layer in facts.layers)
        hidden = prompt_hidden(sizes)
        qkv = max(
            (layer.attention.heads + 2 * layer.attention.kv_heads) * layer.attention.head_dim
            for layer in facts.layers
        )
        self.ids = arena.take((chunk,), torch.int32)
        self.x = arena.take((chunk, width), torch.float32)
        self._h = arena.take((chunk * width,), torch.float16)
        self._queries = arena.take((chunk * heads,), torch.float16)
        self._mixed = arena.take((chunk * heads,), torch.float16)
        self._hidden = arena.take((chunk * hidden,), torch.float16)
        self._products = arena.take((chunk * max(qkv, 2 * hidden, width),), torch.float32)
        self._h_scales, self._hidden_scales = (arena.take((chunk,), torch.float32) for _ in range(2))
        self._ones = arena.take((chunk,), torch.float32)
        self._scratch = arena.take((prompt_scratch(sizes),), torch.float16)
        self._entering = arena.take((chunk * prompt_columns(sizes),), torch.float16)
        self._experts = PrefillExperts(facts, arena, chunk)

    def read(self, tokens: int, start: int) -> Tensor:
        """Take the first `tokens` of `ids` to positions start…; x (tokens, width) above the last layer.

        In a divided model the host's first turn brings the first rows of `x`.
        """
        facts, model = self.model.specification, self.model
        x = self.x[:tokens]
        self._ones.fill_(1.0)
        if self.turns:
            self.turns.receive(1, x, start)
        else:
            self._embed(x)
        h = ScaledRows(self._h[: x.numel()].view(x.shape), self._h_scales[:tokens])
        first = model.layers[0].attention
        norm_rows(x, facts.layers[0].attention.norm, first.norm, first.norm_bias, h.rows, h.scales)
        for index, (layer_facts, layer) in enumerate(zip(facts.layers, model.layers, strict=True)):
            second = layer.feed_forward
            if isinstance(second, DeviceExperts):
                self._experts.route_early(layer_facts.feed_forward, second, x)
            self._attention(layer_facts, layer, x, h, start, index)
            if isinstance(second, DeviceExperts):
                self._mixture(layer_facts.feed_forward, second, x, h, index, start)
            else:
                self._feed_forward(layer_facts, second, x, h, index, start)
            turn = self.turns.turns.behind[index] if self.turns else 0
            if self.turns and turn:
                self.turns.send(x)
                self.turns.receive(turn, x, start)
                self._norm_above(x, h, index)
        return x

    def _norm_above(self, x: Tensor, h: ScaledRows, index: int) -> None:
        """The norm of what follows layer `index`."""
        norm, weight, bias, last = self._following(index)
        if not last:
            norm_rows(x, norm, weight, bias, h.rows, h.scales)

    def _turn_within(self, index: int) -> int:
        """The host's turn in layer `index`'s feed-forward; 0: it has none."""
        return self.turns.turns.within[index] if self.turns else 0

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

    def _attention(
        self,
        layer_facts: LayerSpecification,
        layer: DeviceLayer,
        x: Tensor,
        h: ScaledRows,
        start: int,
        index: int,
    ) -> None:
        facts, w, tokens = layer_facts.attention, layer.attention, len(x)
        qkv = self._stacked(w, facts, h)
        heads = facts.heads * facts.head_dim
        queries = self._queries[: tokens * heads].view(tokens, facts.heads, facts.head_dim)
        cache = layer.cache
        quantised = self.model.quantised_cache
        key_scales = cache.key_scales if quantised else None
        value_scales = cache.value_scales if quantised else None
        rope_append(
            qkv, h.scales, w.qkv_bias, w.q_norm, w.k_norm, w.table, facts, start, queries,
            cache.keys, cache.values, key_scales, value_scales,
        )  # fmt: skip
        mixed = self._mixed[: tokens * heads].view(tokens, heads)
        flash_attention(
            queries, cache.keys, cache.values, start, facts, mixed, self._tile(facts), key_scales,
            value_scales, w.sinks,
        )  # fmt: skip
        y = self._product(mixed, w.output, len(x))
        following = self._streamed(index, tokens) or layer.feed_forward
        join_rows(
            x, y, self._ones[:tokens], w.output_bias, facts.norm, w.post_norm, facts.residual_scale,
            layer_facts.feed_forward.norm, following.norm, following.norm_bias, h.rows, h.scales,
        )  # fmt: skip

    def _tile(self, facts: AttentionSpecification) -> AttentionTile:
        return attention_tile(facts.head_dim, facts.heads // facts.kv_heads, self._capability)

    def _stacked(self, w: DeviceAttention, facts: AttentionSpecification, h: ScaledRows) -> Tensor:
        """q, k and v of all tokens side by side, (tokens, rows) float32."""
        rows = (facts.heads + 2 * facts.kv_heads) * facts.head_dim
        out = self._products[: len(h.rows) * rows].view(len(h.rows), rows)
        entering = self._in_planes_order(h.rows, w.qkv.parts[0].shapes.blocks)
        first = 0
        for part in w.qkv.parts:
            self._multiply(entering, part, out[:, first : first + part.shapes.rows])
            first += part.shapes.rows
        return out

    def _feed_forward(
        self,
        layer_facts: LayerSpecification,
        w: DeviceFeedForward,
        x: Tensor,
        h: ScaledRows,
        index: int,
        start: int,
    ) -> None:
        facts, turn = layer_facts.feed_forward, self._turn_within(index)
        streamed = self._streamed(index, len(x))
        if streamed is not None:
            self._add_streamed(facts, w, streamed, x, h, index)
            return
        if self.turns and turn:
            self.turns.send(x)
        if not w.hidden:
            assert self.turns is not None
            self.turns.receive(turn, x, start)
            self._norm_above(x, h, index)
            return
        y, scales = self.dense(facts.activation, FeedForwardSlice.whole(w), h)
        if self.turns and turn:
            self.turns.receive(turn, x, start)
        norm, weight, bias, last = self._following(index)
        join_rows(
            x, y, scales, w.down_bias, facts.norm, w.post_norm, facts.residual_scale,
            norm, weight, bias, None if last else h.rows, None if last else h.scales,
        )  # fmt: skip

    def _streamed(self, index: int, tokens: int) -> StreamedFeedForward | None:
        """The host's part of a feed-forward, if it is to be sent here for so many tokens."""
        if self.stream is None or tokens < self.stream.least_tokens:
            return None
        return self.stream.parts[index]

    def _add_streamed(
        self,
        facts: FeedForwardSpecification | ExpertsSpecification,
        w: DeviceFeedForward,
        part: StreamedFeedForward,
        x: Tensor,
        h: ScaledRows,
        index: int,
    ) -> None:
        """Both parts of a divided feed-forward, one behind the other; then the norm that follows."""
        if w.hidden:
            y, scales = self.dense(facts.activation, FeedForwardSlice.whole(w), h)
            join_rows(
                x, y, scales, w.down_bias, facts.norm, None, facts.residual_scale,
                facts.norm, None, None, None, None,
            )  # fmt: skip
        y, scales = self._dense_streamed(facts.activation, part, h)
        norm, weight, bias, last = self._following(index)
        join_rows(
            x, y, scales, part.down_bias, facts.norm, None, facts.residual_scale,
            norm, weight, bias, None if last else h.rows, None if last else h.scales,
        )  # fmt: skip

    def _dense_streamed(
        self, activation: Activation, part: StreamedFeedForward, h: ScaledRows
    ) -> tuple[Tensor, Tensor]:
        """`dense` with weights that come from the host."""
        assert self.stream is not None
        tokens, hidden, w = len(h.rows), part.neurons, part.weights
        both = self._products[: 2 * tokens * hidden].view(2, tokens, hidden)
        up, gate = both[0], None
        entering = self._in_planes_order(h.rows, padded_blocks(w.ffn_up.columns))
        self.stream.multiply(entering, w.ffn_up, up, self._multiply)
        if w.ffn_gate is not None:
            gate = both[1]
            self.stream.multiply(entering, w.ffn_gate, gate, self._multiply)
        rows = self._hidden[: tokens * hidden].view(tokens, hidden)
        scales = self._hidden_scales[:tokens]
        activation_rows(gate, up, part.gate_bias, part.up_bias, h.scales, activation, rows, scales)
        out = self._products[: tokens * w.ffn_down.rows].view(tokens, -1)
        entering = self._in_planes_order(rows, padded_blocks(hidden))
        self.stream.multiply(entering, w.ffn_down, out, self._multiply)
        return out, scales

    def _mixture(
        self,
        facts: FeedForwardSpecification | ExpertsSpecification,
        w: DeviceExperts,
        x: Tensor,
        h: ScaledRows,
        index: int,
        start: int,
    ) -> None:
        assert isinstance(facts, ExpertsSpecification)
        turns, turn = self.turns, self._turn_within(index)
        send = partial(turns.send, x) if turns and turn else None
        y = self._experts.read(self, facts, w, h, send)
        if turns and turn:
            turns.receive(turn, x, start)
        norm, weight, bias, last = self._following(index)
        join_rows(
            x, y, self._ones[: len(x)], None, facts.norm, None, facts.residual_scale,
            norm, weight, bias, None if last else h.rows, None if last else h.scales,
        )  # fmt: skip

    def dense(self, activation: Activation, w: FeedForwardSlice, h: ScaledRows) -> tuple[Tensor, Tensor]:
        """down · hidden of some rows without its bias, (tokens, width) float32, and the rows' scales, which
        are still to be multiplied to it. Both are overwritten by the next product.
        """
        tokens, hidden = len(h.rows), w.hidden
        both = self._products[: 2 * tokens * hidden].view(2, tokens, hidden)
        up, gate = both[0], None
        entering = self._in_planes_order(h.rows, w.up.shapes.blocks)
        self._multiply(entering, w.up, up, w.first_hidden)
        if w.gate is not None:
            gate = both[1]
            self._multiply(entering, w.gate, gate, w.first_hidden)
        rows = self._hidden[: tokens * hidden].view(tokens, hidden)
        scales = self._hidden_scales[:tokens]
        activation_rows(gate, up, w.gate_bias, w.up_bias, h.scales, activation, rows, scales)
        width = self.model.specification.width
        out = self._products[: tokens * width].view(tokens, width)
        self._multiply(self._in_planes_order(rows, w.down.shapes.blocks), w.down, out, w.first_out)
        return out, scales

    def _following(self, index: int) -> tuple[NormSpecification, Tensor | None, Tensor | None, bool]:
        """The norm behind layer `index`; whether it is the last layer."""
        if index + 1 == len(self.model.layers):
            return self.model.specification.norm, None, None, True
        w = self.model.layers[index + 1].attention
        return self.model.specification.layers[index + 1].attention.norm, w.norm, w.norm_bias, False

    def _product(self, rows: Tensor, matrix: DeviceMatrix, tokens: int) -> Tensor:
        width = matrix.shapes.rows
        out = self._products[: tokens * width].view(tokens, width)
        self._multiply(self._in_planes_order(rows, matrix.shapes.blocks), matrix, out)
        return out

    def _in_planes_order(self, rows: Tensor, blocks: int) -> Tensor:
        """Rows (tokens, columns) float16 with their columns as `dequantise_kernel` lays out those of a matrix
        of so many blocks a row.
        """
        tokens, columns = rows.shape
        out = self._entering[: tokens * blocks * BLOCK].view(tokens, BLOCK, 8, blocks // 8)
        natural = out.permute(0, 3, 2, 1)
        whole, rest = columns // (8 * BLOCK), columns // BLOCK % 8
        if columns < blocks * BLOCK:
            out.zero_()
        if whole:
            natural[:, :whole].copy_(rows[:, : whole * 8 * BLOCK].unflatten(1, (-1, 8, BLOCK)))
        if rest:
            natural[:, whole, :rest].copy_(rows[:, whole * 8 * BLOCK :].unflatten(1, (rest, BLOCK)))
        return out.view(tokens, blocks * BLOCK)

    def _multiply(self, rows: Tensor, matrix: DeviceMatrix, out: Tensor, first_row: int = 0) -> None:
        """out (tokens, n) float32 = rows, in the planes' order, · n rows of the matrix transposed."""
        shapes, wanted = matrix.shapes, out.shape[1]
        columns = shapes.blocks * BLOCK
        step = max(len(self._scratch) // columns // 16, 1) * 16
        for first in range(0, wanted, step):
            count = min(step, wanted - first)
            weights = self._scratch[: count * columns].view(count, columns)
            dequantise_kernel[(-(-shapes.blocks // DEQUANTISED_BLOCKS), -(-count // 16))](
                matrix.parts,
                first_row + first,
                weights,
                count,
                BLOCKS=shapes.blocks,
                STEP=DEQUANTISED_BLOCKS,
                TILE=shapes.tile,
            )
            _matrix_product(rows, weights, out[:, first : first + count])


def _matrix_product(rows: Tensor, weights: Tensor, out: Tensor) -> None:
    if rows.is_cuda:
        torch.mm(rows, weights.t(), out_dtype=torch.float32, out=out)
    else:
        torch.mm(rows.float(), weights.t().float(), out=out)
