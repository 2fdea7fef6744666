"""Layers of a decoder on several GPUs, one after another: the part of each, and how it is entered."""

from collections.abc import Sequence
from dataclasses import replace

from edgeinfer_kernels.blocks.feed_forward import FeedForwardSpec
from edgeinfer_kernels.blocks.moe import MoeSpec
from edgeinfer_kernels.blocks.rwkv7_time_mix import Rwkv7TimeMixSpec
from edgeinfer_kernels.decoder import DecoderSpec, DecoderWeights, LayerSpec
from edgeinfer_kernels.stages import CPU, GPU, Shard, Stage

UNUSED_HEAD_ROWS = 16
"""Rows of the head of a part that isn't the last: a step always has a head, whose logits nothing reads."""


def pipeline_refusal(spec: DecoderSpec) -> str:
    """Why the layers of a model can't be on several GPUs; "": they can."""
    if spec.is_encoder:
        return "an encoder"
    if spec.specs(Rwkv7TimeMixSpec):
        return "time mixings read values of the first layer"
    if spec.reads_other_layers:
        return "layers read keys, values or inputs of other layers"
    return ""


def layer_parts(
    spec: DecoderSpec, weights: DecoderWeights, counts: Sequence[int]
) -> list[tuple[DecoderSpec, DecoderWeights]]:
    """The decoders of consecutive parts with these numbers of layers. The first one has the embedding, the
    last one the head; the others have UNUSED_HEAD_ROWS rows of it.

    Raises `ValueError`: the counts aren't those of all layers.
    """
    if sum(counts) != len(spec.layers) or min(counts) < 1:
        raise ValueError(
            f"saw parts of {list(counts)} layers, wanted {len(spec.layers)} in all, one at least"
        )
    parts, first = [], 0
    for count in counts:
        end = first + count
        own = replace(spec, layers=spec.layers[first:end])
        held = replace(weights, layers=weights.layers[first:end])
        if end < len(spec.layers):
            bias = None if weights.output_bias is None else weights.output_bias[:UNUSED_HEAD_ROWS]
            own = replace(own, vocabulary_size=UNUSED_HEAD_ROWS)
            held = replace(held, output=weights.output.take_rows(0, UNUSED_HEAD_ROWS), output_bias=bias)
        parts.append((own, held))
        first = end
    return parts


def entered_stages(spec: DecoderSpec) -> tuple[Stage, ...]:
    """The stages of a part that begins with hidden states in its exchange buffer."""
    shards = tuple(_whole_layer(index, layer) for index, layer in enumerate(spec.layers))
    return (Stage(CPU, (), "hidden_states"), Stage(GPU, shards))


def _whole_layer(index: int, layer: LayerSpec) -> Shard:
    block = next((each.block for each in layer.blocks if each.block.is_divisible), None)
    if isinstance(block, MoeSpec):
        return Shard(index, True, experts=tuple(range(block.experts)))
    return Shard(index, True, range(block.neurons) if isinstance(block, FeedForwardSpec) else range(0))
