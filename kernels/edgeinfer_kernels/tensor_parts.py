"""Tensor parallel: which heads, neurons, experts and rows of the head each rank computes of every layer.

A rank is one GPU with its process. All have the same hidden states; the results of a block are partial sums,
which are added up over the ranks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import Any, Literal

from edgeinfer_kernels.blocks.attention import AttentionSpec, AttentionWeights
from edgeinfer_kernels.blocks.feed_forward import NEURON_GROUP, FeedForwardSpec, FeedForwardWeights
from edgeinfer_kernels.blocks.moe import MoeSpec, MoeWeights
from edgeinfer_kernels.cuda.weights.plane_formats import BLOCK, ROW_MULTIPLE
from edgeinfer_kernels.decoder import DecoderSpec, DecoderWeights, LayerSpec, LayerWeights
from edgeinfer_kernels.matrix import MatrixShape, Vector
from edgeinfer_kernels.stages import Shard
from edgeinfer_quant_formats import block_format

MIN_GROUPS = 4
"""Groups of neurons that each rank gets on average, if a group is as large as `NEURON_GROUP`."""
Sums = Literal["auto", "peers", "torch"]
"""What computes the sums of a step over the ranks, as `TorchCollective` takes it."""


class TensorSplitError(ValueError):
    """A model, or one of its layers, can't be divided among the ranks; the message says why."""


@dataclass(frozen=True)
class TensorPart:
    """What a rank has of a decoder besides the weights of its part.

    `vocabulary`: the rows of the head of each rank. `experts`: of each layer, this rank's; empty: the layer
    isn't MoE.
    """

    rank: int
    vocabulary: tuple[range, ...]
    experts: tuple[range, ...]
    is_tied: bool = False
    """Whether the output is the embedding, of which each rank has all rows."""

    @property
    def ranks(self) -> int:
        return len(self.vocabulary)

    @property
    def whole_vocabulary(self) -> int:
        """Rows of the head of all ranks."""
        return self.vocabulary[-1].stop

    def shards(self, spec: DecoderSpec, layer: int) -> list[Shard]:
        """The experts of a layer on this rank, and those of the others; empty: it isn't MoE."""
        here = self.experts[layer]
        if not here:
            return []
        count = next(each.block.experts for each in spec.layers[layer].blocks if _is_moe(each.block))
        elsewhere = tuple(number for number in range(count) if number not in here)
        return [Shard(layer, True, experts=tuple(here)), Shard(layer, False, experts=elsewhere)]


def tensor_refusal(spec: DecoderSpec) -> str:
    """Why the layers of a model can't be divided among ranks; "": they can."""
    if spec.is_encoder:
        return "an encoder"
    if spec.reads_other_layers:
        return "layers read keys, values or inputs of other layers"
    for index in spec.indices():
        block = spec.residual(index).block
        reason = str(block.kind).replace("_", " ")
        if isinstance(block, AttentionSpec):
            reason = attention_refusal(block)
        elif isinstance(block, FeedForwardSpec):
            reason = "a norm of all neurons" if block.sub_norm is not None else ""
        elif isinstance(block, MoeSpec):
            reason = "norms of the sums of experts" if block.dense_norm is not None else ""
        if reason:
            return f"{reason} (layer {index.layer})"
    return ""


def attention_refusal(spec: AttentionSpec) -> str:
    """Why the heads can't be divided; "": they can."""
    if spec.qk_norm == "row" or spec.sub_norm:
        return "a norm of all heads"
    return "ALiBi" if spec.alibi else ""


def divided(count: int, unit: int, shares: Sequence[float], name: str) -> tuple[range, ...]:
    """`count` things as consecutive ranges in multiples of `unit`, at least one unit each, by the ranks'
    `shares`. The last one gets what is left of a unit.

    Raises `TensorSplitError`: there are fewer units than ranks.
    """
    units, ranks = count // unit, len(shares)
    if units < ranks:
        at_once = "" if unit == 1 else f" in groups of {unit}"
        raise TensorSplitError(f"{count} {name}{at_once} can't be divided among {ranks} GPUs")
    total, bounds, held = sum(shares), [0], 0.0
    for rank, share in enumerate(shares[:-1]):
        held += share
        wanted = round(units * held / total)
        bounds.append(min(max(wanted, bounds[-1] + 1), units - (ranks - rank - 1)))
    ends = [*(bound * unit for bound in bounds[1:]), count]
    return tuple(range(first * unit, last) for first, last in zip(bounds, ends, strict=True))


def heads_of(spec: AttentionSpec, output: MatrixShape, shares: Sequence[float]) -> tuple[range, ...]:
    """The KV heads of each rank, with all their queries. `output`: the matrix of the results of heads.

    Raises `TensorSplitError`.
    """
    queries = spec.heads // spec.kv_heads
    unit = 1
    for rows, multiple in (
        (queries * spec.q_head, ROW_MULTIPLE),
        (spec.head_dim, ROW_MULTIPLE),
        (queries * spec.value_dim, _columns(output)),
    ):
        unit = lcm(unit, lcm(rows, multiple) // rows)
    return divided(spec.kv_heads, unit, shares, "key heads")


def neurons_of(neurons: int, down: MatrixShape, shares: Sequence[float]) -> tuple[range, ...]:
    """The neurons of each rank, in whole blocks of the format of `down`. Raises `TensorSplitError`."""
    unit = lcm(ROW_MULTIPLE, _columns(down))
    large = lcm(unit, NEURON_GROUP)
    if neurons // large >= MIN_GROUPS * len(shares):
        unit = large
    return divided(neurons, unit, shares, "neurons")


def _columns(matrix: MatrixShape) -> int:
    """Columns that can't be divided."""
    return lcm(BLOCK, block_format(matrix.format).block_elements)


def experts_of(experts: int, shares: Sequence[float]) -> tuple[range, ...]:
    """The experts of each rank. Raises `TensorSplitError`."""
    return divided(experts, 1, shares, "experts")


def vocabulary_of(rows: int, shares: Sequence[float]) -> tuple[range, ...]:
    """The rows of the head of each rank. Raises `TensorSplitError`."""
    return divided(rows, ROW_MULTIPLE, shares, "tokens")


def tensor_part(
    spec: DecoderSpec, weights: DecoderWeights, shares: Sequence[float], rank: int
) -> tuple[DecoderSpec, DecoderWeights, TensorPart]:
    """Specification and weights of one rank. Biases that are added to a sum are on rank 0.

    Raises `TensorSplitError`: a layer can't be divided.
    """
    if refusal := tensor_refusal(spec):
        raise TensorSplitError(f"its layers can't be divided among GPUs: {refusal}")
    layers, held, experts = [], [], []
    for layer, of_layer in zip(spec.layers, weights.layers, strict=True):
        blocks, parts, here = [], [], range(0)
        for residual, own in zip(layer.blocks, of_layer.blocks, strict=True):
            block, part = _block_part(residual.block, own.block, shares, rank)
            if isinstance(block, MoeSpec):
                here = experts_of(block.experts, shares)[rank]
            blocks.append(replace(residual, block=block))
            parts.append(own.with_block(part))
        layers.append(LayerSpec(tuple(blocks)))
        held.append(LayerWeights(tuple(parts)))
        experts.append(here)
    vocabulary = vocabulary_of(spec.vocabulary_size, shares)
    rows = vocabulary[rank]
    bias = weights.output_bias
    return (
        replace(spec, layers=tuple(layers), vocabulary_size=len(rows)),
        replace(
            weights,
            layers=tuple(held),
            output=weights.output.take_rows(rows.start, rows.stop),
            output_bias=None if bias is None else bias[rows.start : rows.stop],
        ),
        TensorPart(rank, vocabulary, tuple(experts), weights.token_embd is weights.output),
    )


def _block_part(block: Any, w: Any, shares: Sequence[float], rank: int) -> tuple[Any, Any]:
    if isinstance(block, AttentionSpec):
        heads = heads_of(block, w.attn_output, shares)[rank]
        queries = block.heads // block.kv_heads
        spec = replace(block, heads=len(heads) * queries, kv_heads=len(heads))
        return spec, _attention_part(block, w, heads, rank)
    if isinstance(block, FeedForwardSpec):
        neurons = neurons_of(block.neurons, w.ffn_down, shares)[rank]
        return replace(block, neurons=len(neurons)), _feed_forward_part(w, neurons, rank)
    held: MoeWeights = w.of_experts(experts_of(block.experts, shares)[rank])
    if held.shared is not None:
        neurons = neurons_of(block.shared_neurons, held.shared.ffn_down, shares)[rank]
        held = replace(held, shared=_feed_forward_part(held.shared, neurons, rank))
    return block, held


def _feed_forward_part(w: FeedForwardWeights, neurons: range, rank: int) -> FeedForwardWeights:
    return replace(w.of_neurons(neurons.start, neurons.stop), ffn_down_bias=_of_first(w.ffn_down_bias, rank))


def _of_first(bias: Vector | None, rank: int) -> Vector | None:
    """A bias of a sum over the ranks."""
    return bias if rank == 0 else None


def _attention_part(spec: AttentionSpec, w: AttentionWeights, heads: range, rank: int) -> AttentionWeights:
    """The weights of some KV heads and their queries."""
    queries = spec.heads // spec.kv_heads
    first, last = heads.start, heads.stop

    def rows(each: int) -> tuple[int, int]:
        return first * each, last * each

    def part(vector: Vector | None, each: int) -> Vector | None:
        return None if vector is None else vector[first * each : last * each]

    q, k, v = queries * spec.q_head, spec.head_dim, spec.value_dim
    return replace(
        w,
        attn_q=w.attn_q.take_rows(*rows(q)),
        attn_k=w.attn_k.take_rows(*rows(k)),
        attn_v=w.attn_v.take_rows(*rows(v)),
        attn_output=w.attn_output.take_columns(*rows(queries * v)),
        attn_q_bias=part(w.attn_q_bias, q),
        attn_k_bias=part(w.attn_k_bias, k),
        attn_v_bias=part(w.attn_v_bias, v),
        attn_output_bias=_of_first(w.attn_output_bias, rank),
        attn_sinks=part(w.attn_sinks, queries),
        attn_gate=None if w.attn_gate is None else w.attn_gate.take_rows(*rows(queries)),
    )


def _is_moe(block: Any) -> bool:
    return isinstance(block, MoeSpec)
