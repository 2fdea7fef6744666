"""The LoRA adapters of a rank of tensor parallel: of its rows, columns and experts of each matrix."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from edgeinfer_kernels.blocks.attention import AttentionSpec, AttentionWeights
from edgeinfer_kernels.blocks.feed_forward import FeedForwardWeights
from edgeinfer_kernels.blocks.moe import MoeWeights
from edgeinfer_kernels.decoder import DecoderSpec, DecoderWeights
from edgeinfer_kernels.lora.shards import cut
from edgeinfer_kernels.lora.weights import ModelLora
from edgeinfer_kernels.matrix import Matrix
from edgeinfer_kernels.tensor_parts import experts_of, heads_of, neurons_of, vocabulary_of


class _Part(NamedTuple):
    """A matrix of the file, that of the rank, and which rows, columns and experts it has; None: all."""

    source: Matrix
    own: Matrix
    rows: range | None = None
    columns: range | None = None
    experts: Sequence[int] | None = None


def tensor_lora(
    lora: ModelLora,
    spec: DecoderSpec,
    whole: DecoderWeights,
    part: DecoderWeights,
    shares: Sequence[float],
    rank: int,
) -> ModelLora:
    """The adapters of the matrices of a rank, of those of the `whole`; `part` as `tensor_part` returns it."""
    vocabulary = vocabulary_of(spec.vocabulary_size, shares)[rank]
    parts = [_Part(whole.output, part.output, rows=vocabulary)]
    for layer, of_layer, own_layer in zip(spec.layers, whole.layers, part.layers, strict=True):
        for residual, source, own in zip(layer.blocks, of_layer.blocks, own_layer.blocks, strict=True):
            parts += _parts(residual.block, source.block, own.block, shares, rank)
    found = {
        id(each.own): cut(lora.matrices[id(each.source)], each.rows, each.columns, each.experts)
        for each in parts
        if id(each.source) in lora.matrices
    }
    return ModelLora(found, lora.embedding)


def _parts(block: Any, whole: Any, own: Any, shares: Sequence[float], rank: int) -> Iterator[_Part]:
    if isinstance(block, AttentionSpec):
        yield from _of_attention(block, whole, own, heads_of(block, whole.attn_output, shares)[rank])
    elif isinstance(whole, FeedForwardWeights):
        yield from _of_feed_forward(whole, own, neurons_of(block.neurons, whole.ffn_down, shares)[rank])
    elif isinstance(whole, MoeWeights):
        experts = experts_of(block.experts, shares)[rank]
        for source, held in zip(whole.stacks(), own.stacks(), strict=True):
            yield _Part(source, held, experts=experts)
        for matrix in (whole.ffn_gate_inp, *whole.latents()):
            yield _Part(matrix, matrix)
        if whole.shared is not None:
            neurons = neurons_of(block.shared_neurons, whole.shared.ffn_down, shares)[rank]
            yield from _of_feed_forward(whole.shared, own.shared, neurons)


def _of_attention(
    spec: AttentionSpec, whole: AttentionWeights, own: AttentionWeights, heads: range
) -> Iterator[_Part]:
    queries = spec.heads // spec.kv_heads

    def of_each(count: int) -> range:
        return range(heads.start * count, heads.stop * count)

    yield _Part(whole.attn_q, own.attn_q, rows=of_each(queries * spec.q_head))
    yield _Part(whole.attn_k, own.attn_k, rows=of_each(spec.head_dim))
    yield _Part(whole.attn_v, own.attn_v, rows=of_each(spec.value_dim))
    yield _Part(whole.attn_output, own.attn_output, columns=of_each(queries * spec.value_dim))
    if whole.attn_gate is not None and own.attn_gate is not None:
        yield _Part(whole.attn_gate, own.attn_gate, rows=of_each(queries))


def _of_feed_forward(whole: FeedForwardWeights, own: FeedForwardWeights, neurons: range) -> Iterator[_Part]:
    yield _Part(whole.ffn_up, own.ffn_up, rows=neurons)
    if whole.ffn_gate is not None and own.ffn_gate is not None:
        yield _Part(whole.ffn_gate, own.ffn_gate, rows=neurons)
    yield _Part(whole.ffn_down, own.ffn_down, columns=neurons)
