"""Reading a prompt: chunks of tokens through float16 products with dequantised weights.

Every matrix is dequantised, slice by slice, into a scratch that the library's matrix product then reads: on
hundreds of tokens that beats a product on packed weights. Activations are float16 under a scale a row, so
that none overflows; sums and the residual stream are float32.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.device_model import DeviceAttention, DeviceFeedForward, DeviceLayer, DeviceModel
from edgeinfer_kernels.cuda.embedding_kernels import dequantise_kernel, embed_rows_kernel
from edgeinfer_kernels.cuda.flash_attention import AttentionTile, attention_tile, flash_attention
from edgeinfer_kernels.cuda.packing import DeviceMatrix
from edgeinfer_kernels.cuda.plane_formats import BLOCK
from edgeinfer_kernels.cuda.prefill_rope import rope_append
from edgeinfer_kernels.cuda.prefill_rows import activation_rows, join_rows, norm_rows
from edgeinfer_kernels.specification import AttentionSpecification, LayerSpecification, NormSpecification

DEQUANTISED_BLOCKS = 64
"""Blocks of a row that a program dequantises."""
SCRATCH_WEIGHTS = 32 << 20
"""Most weights that are dequantised at a time: 64 MiB, about what a large GPU's cache holds."""


@dataclass(frozen=True)
class _Scaled:
    """Rows of float16 with a scale each: the value is rows · scales."""

    rows: Tensor
    scales: Tensor


class Prefill:
    """Takes chunks of at most `chunk` tokens up the layers; the buffers come from the arena."""

    def __init__(self, model: DeviceModel, arena: Arena, chunk: int, capability: int) -> None:
        self.model = model
        self.chunk = chunk
        self._capability = capability
        facts = model.specification
        width = facts.width
        heads = max(layer.attention.heads * layer.attention.head_dim for layer in facts.layers)
        hidden = max(layer.feed_forward.up.shapes.rows for layer in model.layers)
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
        self._scratch = arena.take((self._scratch_weights(),), torch.float16)
        longest = max(matrix.shapes.blocks for matrix in self._matrices()) * BLOCK
        self._entering = arena.take((chunk * longest,), torch.float16)

    def _matrices(self) -> list[DeviceMatrix]:
        found = []
        for layer in self.model.layers:
            found += [*layer.attention.qkv.parts, layer.attention.output]
            found += [m for m in (layer.feed_forward.gate, layer.feed_forward.up) if m is not None]
            found.append(layer.feed_forward.down)
        return found

    def _scratch_weights(self) -> int:
        most = 0
        for matrix in self._matrices():
            columns = matrix.shapes.blocks * BLOCK
            rows = min(matrix.shapes.padded_rows, max(SCRATCH_WEIGHTS // columns // 16, 1) * 16)
            most = max(most, rows * columns)
        return most

    def read(self, tokens: int, start: int) -> Tensor:
        """Take the first `tokens` of `ids` to positions start…; x (tokens, width) above the last layer.

        Without an embedding the first rows of `x` are taken.
        """
        facts, model = self.model.specification, self.model
        x = self.x[:tokens]
        self._ones.fill_(1.0)
        if model.embeds:
            self._embed(x)
        h = _Scaled(self._h[: x.numel()].view(x.shape), self._h_scales[:tokens])
        first = model.layers[0].attention
        norm_rows(x, facts.layers[0].attention.norm, first.norm, first.norm_bias, h.rows, h.scales)
        for index, (layer_facts, layer) in enumerate(zip(facts.layers, model.layers, strict=True)):
            self._attention(layer_facts, layer, x, h, start)
            self._feed_forward(layer_facts, layer.feed_forward, x, h, index)
        return x

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
        self, layer_facts: LayerSpecification, layer: DeviceLayer, x: Tensor, h: _Scaled, start: int
    ) -> None:
        facts, w, tokens = layer_facts.attention, layer.attention, len(x)
        qkv = self._stacked(w, facts, h)
        heads = facts.heads * facts.head_dim
        queries = self._queries[: tokens * heads].view(tokens, facts.heads, facts.head_dim)
        cache = layer.cache
        quantised = self.model.quantised_cache
        scales = (cache.key_scales, cache.value_scales) if quantised else (None, None)
        rope_append(
            qkv, h.scales, w.qkv_bias, w.q_norm, w.k_norm, w.table, facts, start, queries,
            cache.keys, cache.values, *scales,
        )  # fmt: skip
        mixed = self._mixed[: tokens * heads].view(tokens, heads)
        flash_attention(queries, cache.keys, cache.values, start, facts, mixed, self._tile(facts), *scales)
        y = self._product(mixed, w.output, len(x))
        following = layer.feed_forward
        join_rows(
            x, y, self._ones[:tokens], w.output_bias, facts.norm, w.post_norm, facts.residual_scale,
            layer_facts.feed_forward.norm, following.norm, following.norm_bias, h.rows, h.scales,
        )  # fmt: skip

    def _tile(self, facts: AttentionSpecification) -> AttentionTile:
        return attention_tile(facts.head_dim, facts.heads // facts.kv_heads, self._capability)

    def _stacked(self, w: DeviceAttention, facts: AttentionSpecification, h: _Scaled) -> Tensor:
        """q, k and v of all tokens side by side, (tokens, rows) float32."""
        rows = (facts.heads + 2 * facts.kv_heads) * facts.head_dim
        out = self._products[: len(h.rows) * rows].view(len(h.rows), rows)
        entering = self._in_planes_order(h.rows, w.qkv.parts[0])
        first = 0
        for part in w.qkv.parts:
            self._multiply(entering, part, out[:, first : first + part.shapes.rows])
            first += part.shapes.rows
        return out

    def _feed_forward(
        self, layer_facts: LayerSpecification, w: DeviceFeedForward, x: Tensor, h: _Scaled, index: int
    ) -> None:
        facts, tokens, hidden = layer_facts.feed_forward, len(x), w.up.shapes.rows
        both = self._products[: 2 * tokens * hidden].view(2, tokens, hidden)
        up, gate = both[0], None
        entering = self._in_planes_order(h.rows, w.up)
        self._multiply(entering, w.up, up)
        if w.gate is not None:
            gate = both[1]
            self._multiply(entering, w.gate, gate)
        rows = self._hidden[: tokens * hidden].view(tokens, hidden)
        scales = self._hidden_scales[:tokens]
        activation_rows(gate, up, w.gate_bias, w.up_bias, h.scales, facts.activation, rows, scales)
        y = self._product(rows, w.down, tokens)
        norm, weight, bias, last = self._following(index)
        join_rows(
            x, y, scales, w.down_bias, facts.norm, w.post_norm, facts.residual_scale,
            norm, weight, bias, None if last else h.rows, None if last else h.scales,
        )  # fmt: skip

    def _following(self, index: int) -> tuple[NormSpecification, Tensor | None, Tensor | None, bool]:
        """The norm behind layer `index`; whether it is the last layer."""
        if index + 1 == len(self.model.layers):
            return self.model.specification.norm, None, None, True
        w = self.model.layers[index + 1].attention
        return self.model.specification.layers[index + 1].attention.norm, w.norm, w.norm_bias, False

    def _product(self, rows: Tensor, matrix: DeviceMatrix, tokens: int) -> Tensor:
        width = matrix.shapes.rows
        out = self._products[: tokens * width].view(tokens, width)
        self._multiply(self._in_planes_order(rows, matrix), matrix, out)
        return out

    def _in_planes_order(self, rows: Tensor, matrix: DeviceMatrix) -> Tensor:
        """Rows (tokens, columns) float16 with their columns as `dequantise_kernel` lays out the matrix's."""
        tokens, columns = rows.shape
        blocks = matrix.shapes.blocks
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

    def _multiply(self, rows: Tensor, matrix: DeviceMatrix, out: Tensor) -> None:
        """out (tokens, rows of the matrix) float32 = rows, in the planes' order, · matrix transposed."""
        shapes = matrix.shapes
        columns = shapes.blocks * BLOCK
        step = max(len(self._scratch) // columns // 16, 1) * 16
        for first in range(0, shapes.rows, step):
            count = min(step, shapes.rows - first)
            weights = self._scratch[: count * columns].view(count, columns)
            dequantise_kernel[(-(-shapes.blocks // DEQUANTISED_BLOCKS), -(-count // 16))](
                matrix.parts,
                first,
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
