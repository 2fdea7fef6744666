"""Stages: what each device computes of a step, how GPU and CPU execute those of a split model, and the layers
of several GPUs.
"""

from bisect import bisect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from edgeinfer_kernels.blocks.feed_forward import FeedForwardSpec, FeedForwardWeights
from edgeinfer_kernels.blocks.moe import MoeSpec, MoeWeights
from edgeinfer_kernels.blocks.rwkv7_time_mix import Rwkv7TimeMixSpec
from edgeinfer_kernels.decoder import (
    BlockIndex,
    DecoderSpec,
    DecoderWeights,
    LayerSpec,
    LayerWeights,
    ResidualWeights,
)


@dataclass(frozen=True)
class Device:
    """The CPU, or a GPU by its index."""

    kind: Literal["cpu", "gpu"]
    index: int = 0

    @classmethod
    def of(cls, name: str) -> Self:
        """The device that computes with what is on "cpu", "disk" (memory-mapped), "gpu", "gpu1", …"""
        return cls("gpu", int(name[3:] or 0)) if name.startswith("gpu") else cls("cpu")

    @property
    def name(self) -> str:
        """The name in plans."""
        return f"{self.kind}{self.index or ''}"


CPU, GPU = Device("cpu"), Device("gpu")


@dataclass(frozen=True)
class Shard:
    """What a device computes of a layer in a stage: its `undivided` blocks with their state (attention,
    router, shared expert), and `neurons` or `experts` (ascending) of its divisible block.

    `holds_all`: the device holds the experts of other devices too, which can replace theirs at run time.
    """

    layer: int
    undivided: bool
    neurons: range = range(0)
    experts: tuple[int, ...] = ()
    holds_all: bool = False

    def with_shard(self, other: Self) -> Self:
        """Both shards of a layer on one device as one."""
        return replace(
            self,
            undivided=self.undivided or other.undivided,
            neurons=self.neurons or other.neurons,
            experts=self.experts + other.experts,
            holds_all=self.holds_all or other.holds_all,
        )


Exchange = Literal["hidden_states", "partial_sums", ""]


@dataclass(frozen=True)
class Stage:
    """Consecutive shards on one device, and what it sends at the end.

    `hidden_states`: to the device of the next stage. `partial_sums`: adjacent stages of one layer run at the
    same time, and the device that follows adds their results. The first stage of a step begins with the
    embedding, the last one ends with the logits.
    """

    device: Device
    shards: tuple[Shard, ...]
    exchange: Exchange = ""


def shards_on(device: Device, stages: Sequence[Stage]) -> dict[int, Shard]:
    """What a device computes of each layer, in all of its stages together."""
    found: dict[int, Shard] = {}
    for shard in (shard for stage in stages if stage.device == device for shard in stage.shards):
        before = found.get(shard.layer)
        found[shard.layer] = before.with_shard(shard) if before else shard
    return found


def stage_blocks(
    spec: DecoderSpec, device: Device, stages: Sequence[Stage]
) -> tuple[tuple[BlockIndex, ...], ...]:
    """The blocks of which a device computes a part, for each of its stages."""
    return tuple(
        tuple(index for shard in stage.shards for index in _blocks(spec, shard))
        for stage in stages
        if stage.device == device
    )


def _blocks(spec: DecoderSpec, shard: Shard) -> Iterator[BlockIndex]:
    for position, residual in enumerate(spec.layers[shard.layer].blocks):
        if (shard.neurons or shard.experts) if residual.block.is_divisible else shard.undivided:
            yield BlockIndex(shard.layer, position)


STEP_TOKENS = 16
"""Minimum number of tokens for which CPU stages are allocated, even if the CPU computes fewer of a prompt."""


def host_batch(batch: int, stream_min_tokens: int | None) -> int:
    """Maximum number of tokens that the CPU computes at a time, in steps of at most `batch`.

    For prompts of at least `stream_min_tokens` tokens its weights are streamed to the GPU; None: never.
    """
    return batch if stream_min_tokens is None else min(batch, max(stream_min_tokens - 1, STEP_TOKENS))


@dataclass(frozen=True)
class CpuStages:
    """The CPU stages of a step: the blocks of each stage, and when a GPU runs relative to them.

    Stages are numbered from 1 in execution order. Stage 1 runs before the GPU's first block and starts with
    the embedding. For each GPU block (by its index on the GPU), `parallel` is the stage that runs in parallel
    with it or replaces it; `after` is the stage between it and the next GPU block; 0: none.
    """

    stages: tuple[tuple[BlockIndex, ...], ...]
    parallel: tuple[int, ...]
    after: tuple[int, ...]


def cpu_stages(spec: DecoderSpec, gpu: Device, stages: Sequence[Stage]) -> CpuStages:
    """The CPU stages of a split model, as a GPU meets them.

    Raises:
        ValueError: the split model doesn't start on the CPU and end on its only GPU.
    """
    devices = [stage.device for stage in stages]
    if (devices[0], devices[-1]) != (CPU, gpu) or set(devices) != {CPU, gpu}:
        names = ", ".join(device.name for device in devices)
        raise ValueError(f"saw stages on {names}: a split model starts on the CPU and ends on its only GPU")
    blocks, shards = stage_blocks(spec, CPU, stages), shards_on(gpu, stages)
    on_gpu = [index for index in spec.indices() if index.layer in shards]
    parallel, after = [0] * len(on_gpu), [0] * len(on_gpu)
    for number, (first, *_) in enumerate(blocks[1:], 2):
        (parallel if first.layer in shards else after)[bisect(on_gpu, first) - 1] = number
    return CpuStages(blocks, tuple(parallel), tuple(after))


def part_of_decoder(
    spec: DecoderSpec, weights: DecoderWeights, shards: Mapping[int, Shard]
) -> tuple[DecoderSpec, DecoderWeights]:
    """Specification and weights of the layers in `shards`, with only the weights of these shards.

    Raises:
        ValueError: a feed-forward with a norm would be split, or the model can't be split.
    """
    if spec.specs(Rwkv7TimeMixSpec):
        raise ValueError("time mixings read values of the first layer: they can't be on different devices")
    here = [layer for layer, shard in shards.items() if shard.undivided]
    if spec.reads_other_layers and len(here) < len(spec.layers):
        raise ValueError(
            "layers read keys, values or inputs of other layers: only feed-forwards and experts can be on "
            f"another device, {len(here)} of {len(spec.layers)} layers have their other blocks on this one"
        )
    specs = tuple(spec.layers[layer] for layer in shards)
    layers = tuple(
        LayerWeights(
            tuple(
                part_of_block(residual, shard, keeps_norm=spec.layers[layer].has_shared_norm(position))
                for position, residual in enumerate(weights.layers[layer].blocks)
            )
        )
        for layer, shard in shards.items()
    )
    return replace(spec, layers=specs), replace(weights, layers=layers)


def part_of_block(
    residual: ResidualWeights[Any], shard: Shard, *, keeps_norm: bool = False
) -> ResidualWeights[Any]:
    """The part of a block in a shard of its layer, that of a divisible block with the experts it holds.

    A part of a feed-forward has its down bias if it is on the device of the undivided blocks, which adds up
    the parts; without neurons it has no vectors, but with `keeps_norm` the norm, which another block reads.

    Raises:
        ValueError: a feed-forward with a norm of all neurons, or of their sum, would be split.
    """
    block, neurons = residual.block, shard.neurons
    if isinstance(block, MoeWeights):
        count = block.ffn_up_exps.experts
        held = range(count) if shard.holds_all else shard.experts
        return residual if len(held) == count else residual.with_block(block.of_experts(held))
    if not isinstance(block, FeedForwardWeights) or len(neurons) == block.ffn_up.rows:
        return residual
    if not neurons:
        norms = (residual.norm, residual.norm_bias) if keeps_norm else ()
        return ResidualWeights(block.bare().of_neurons(0, 0), *norms)
    if residual.post_norm is not None:
        raise ValueError(f"{block.ffn_up.name}: a feed-forward with a post-norm can't be split")
    if block.sub_norm is not None:
        raise ValueError(f"{block.ffn_up.name}: a feed-forward with a norm of its neurons can't be split")
    part = block.of_neurons(neurons.start, neurons.stop)
    return residual.with_block(part if shard.undivided else replace(part, ffn_down_bias=None))


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
