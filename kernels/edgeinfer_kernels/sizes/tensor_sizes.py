"""The sizes of one rank's part of a model, as `tensor_parts.py` divides the model itself."""

from collections.abc import Sequence
from dataclasses import replace

from edgeinfer_kernels.blocks.attention import AttentionSizes
from edgeinfer_kernels.blocks.common.block_sizes import BlockSizes
from edgeinfer_kernels.blocks.feed_forward import FeedForwardSizes
from edgeinfer_kernels.blocks.moe import MoeSizes
from edgeinfer_kernels.matrix import MatrixSize
from edgeinfer_kernels.sizes.cuda_buffers import MAX_TOKENS
from edgeinfer_kernels.sizes.cuda_matrices import padded_rows, taken
from edgeinfer_kernels.sizes.model_sizes import LayerSizes, ModelSizes
from edgeinfer_kernels.tensor_parts import (
    TensorSplitError,
    attention_refusal,
    experts_of,
    heads_of,
    neurons_of,
    vocabulary_of,
)


def tensor_sizes_refusal(sizes: ModelSizes) -> str:
    """As `tensor_refusal`, of a model's sizes."""
    if sizes.is_encoder:
        return "an encoder"
    for layer, of_layer in enumerate(sizes.layers):
        for block in of_layer.blocks:
            reason = _refusal(block)
            if reason:
                return f"{reason} (layer {layer})"
    return ""


def _refusal(block: BlockSizes) -> str:
    if block.reads_other_layers:
        return "layers read keys, values or inputs of other layers"
    if isinstance(block, AttentionSizes):
        return attention_refusal(block.spec)
    if isinstance(block, FeedForwardSizes):
        return "a norm of all neurons" if block.sub_normed else ""
    if isinstance(block, MoeSizes):
        return "norms of the sums of experts" if block.spec.dense_norm is not None else ""
    return block.label


def tensor_sizes(sizes: ModelSizes, shares: Sequence[float], rank: int) -> ModelSizes:
    """The sizes of a rank's part, vectors as those of the whole model.

    Raises `TensorSplitError`: a layer can't be divided.
    """
    if refusal := tensor_sizes_refusal(sizes):
        raise TensorSplitError(f"its layers can't be divided among GPUs: {refusal}")
    layers = (
        LayerSizes(tuple(_part(block, shares, rank) for block in layer.blocks)) for layer in sizes.layers
    )
    rows = len(vocabulary_of(sizes.vocabulary, shares)[rank])
    return replace(sizes, layers=tuple(layers), head=replace(sizes.head, rows=rows), embedding=sizes.table)


def exchange_bytes(sizes: ModelSizes, shares: Sequence[float], chunk: int) -> int:
    """Bytes of the buffers for logits of each rank and for sums of steps and chunks, on each GPU."""
    rows = max(map(len, vocabulary_of(sizes.vocabulary, shares)))
    columns = padded_rows(sizes.hidden_size) + rows
    words = taken(MAX_TOKENS * columns, 4 + 16 * len(shares))
    sums = words + 2 * taken(chunk * sizes.hidden_size, 4)
    return (1 + len(shares)) * taken(MAX_TOKENS * rows, 4) + sums


def _part(block: BlockSizes, shares: Sequence[float], rank: int) -> BlockSizes:
    if isinstance(block, AttentionSizes):
        return _attention_part(block, len(heads_of(block.spec, block.output, shares)[rank]))
    if isinstance(block, FeedForwardSizes):
        return block.part(len(neurons_of(block.neurons, block.down, shares)[rank]))
    assert isinstance(block, MoeSizes)
    experts = len(experts_of(block.granules, shares)[rank])
    shared = block.shared
    if shared is not None:
        shared = shared.part(len(neurons_of(shared.neurons, shared.down, shares)[rank]))
    each = min(block.spec.experts_per_token, experts)
    spec = replace(block.spec, experts=experts, experts_per_token=each, groups=1, groups_per_token=1)
    return replace(block, spec=spec, shared=shared)


def _attention_part(block: AttentionSizes, heads: int) -> AttentionSizes:
    whole = block.spec

    def rows(matrix: MatrixSize) -> MatrixSize:
        return replace(matrix, rows=matrix.rows * heads // whole.kv_heads)

    return replace(
        block,
        spec=replace(whole, heads=whole.heads * heads // whole.kv_heads, kv_heads=heads),
        q=rows(block.q),
        k=rows(block.k),
        v=rows(block.v),
        output=replace(block.output, columns=block.output.columns * heads // whole.kv_heads),
        gate=None if block.gate is None else rows(block.gate),
    )
