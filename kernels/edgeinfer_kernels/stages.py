"""Stages: what each device computes of a step, and how GPU and CPU execute those of a split model."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self

from edgeinfer_kernels.blocks.feed_forward import FeedForwardWeights
from edgeinfer_kernels.blocks.moe import MoeWeights
from edgeinfer_kernels.decoder import (
    BlockIndex,
    DecoderSpec,
    DecoderWeights,
    LayerWeights,
    ResidualWeights,
    blocks_of,
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


@dataclass(frozen=True)
class Shard:
    """What a device computes of a layer in a stage: its `undivided` blocks with their state (attention,
    router, shared expert), and `neurons` or `experts` of its divisible block.

    `holds_all`: the device holds the experts of other devices too, which can replace theirs at run time.
    """

    layer: int
    undivided: bool
    neurons: range = range(0)
    experts: tuple[int, ...] = ()
    holds_all: bool = False


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


@dataclass(frozen=True)
class LayerSplit:
    """The parts of one layer that are on the GPU; the CPU has all others.

    `on_gpu`: the blocks that aren't divisible and their state are on the GPU (with the router and the shared
    expert of an MoE block); otherwise nothing is. Of a dense feed-forward the GPU has the first `neurons`, of
    an MoE block the experts listed in `experts`. `has_expert_cache`: the CPU has all experts, so the GPU can
    replace its experts at run time.
    """

    on_gpu: bool
    neurons: int = 0
    experts: tuple[int, ...] = ()
    has_expert_cache: bool = False


def layer_splits(stages: Sequence[Stage], layers: int) -> tuple[LayerSplit, ...]:
    """The split of each layer between one GPU and the CPU."""
    found = [LayerSplit(on_gpu=False)] * layers
    for stage in stages:
        for shard in stage.shards:
            split = found[shard.layer]
            if stage.device.kind == "gpu":
                on_gpu, neurons = split.on_gpu or shard.undivided, split.neurons + len(shard.neurons)
                split = replace(split, on_gpu=on_gpu, neurons=neurons, experts=split.experts + shard.experts)
            found[shard.layer] = replace(split, has_expert_cache=split.has_expert_cache or shard.holds_all)
    return tuple(found)


STEP_TOKENS = 8
"""Minimum number of tokens for which CPU stages are allocated, even if the CPU computes fewer of a prompt."""


def host_batch(batch: int, stream_min_tokens: int | None) -> int:
    """Maximum number of tokens that the CPU computes at a time, in steps of at most `batch`.

    For prompts of at least `stream_min_tokens` tokens its weights are streamed to the GPU; None: never.
    """
    return batch if stream_min_tokens is None else min(batch, max(stream_min_tokens - 1, STEP_TOKENS))


WHOLLY_ON_HOST = LayerSplit(on_gpu=False)


@dataclass(frozen=True)
class CpuStages:
    """The CPU stages of a step: the blocks of each stage, and when the GPU runs relative to them.

    Stages are numbered from 1 in execution order. Stage 1 runs before the GPU's first block and starts with
    the embedding. For each GPU block (by its index on the GPU), `parallel` is the stage that runs in parallel
    with it or replaces it; `after` is the stage between it and the next GPU block; 0: none.
    """

    stages: tuple[tuple[BlockIndex, ...], ...]
    parallel: tuple[int, ...]
    after: tuple[int, ...]


def cpu_stages(spec: DecoderSpec, weights: DecoderWeights, splits: Sequence[LayerSplit]) -> CpuStages:
    """The CPU stages of a split model. Consecutive CPU blocks form one stage unless the GPU must add a sum in
    between.
    """
    stages: list[list[BlockIndex]] = [[]]
    parallel: list[int] = []
    after: list[int] = []
    is_open = True
    for index, _, w in blocks_of(spec, weights):
        split = splits[index.layer]
        if not split.on_gpu:
            if not is_open:
                stages.append([])
                after[-1] = len(stages)
                is_open = True
            stages[-1].append(index)
            continue
        parallel.append(0)
        after.append(0)
        is_open = False
        if has_host_part(w.block, split):
            stages.append([index])
            parallel[-1] = len(stages)
            is_open = not _gpu_adds(w.block, split)
    return CpuStages(tuple(map(tuple, stages)), tuple(parallel), tuple(after))


def has_host_part(block: Any, split: LayerSplit) -> bool:
    """Whether the CPU computes any part of a block, given its weights, in a layer that is on the GPU."""
    if isinstance(block, MoeWeights):
        return len(split.experts) < block.ffn_up_exps.experts
    return isinstance(block, FeedForwardWeights) and split.neurons < block.ffn_up.rows


def _gpu_adds(block: Any, split: LayerSplit) -> bool:
    """Whether the GPU has a part of the block to add to the CPU's result."""
    return split.neurons > 0 or isinstance(block, MoeWeights)


def gpu_shard(
    spec: DecoderSpec, weights: DecoderWeights, splits: Sequence[LayerSplit]
) -> tuple[DecoderSpec, DecoderWeights]:
    """Specification and weights of the layers that are on the GPU, with only the weights that the GPU has.

    Raises:
        ValueError: a feed-forward with a post-norm would be split.
    """
    here = [layer for layer, split in enumerate(splits) if split.on_gpu]
    layers = tuple(
        LayerWeights(tuple(_gpu_part(residual, splits[layer]) for residual in weights.layers[layer].blocks))
        for layer in here
    )
    specs = tuple(spec.layers[layer] for layer in here)
    return replace(spec, layers=specs), replace(weights, layers=layers)


def _gpu_part(residual: ResidualWeights[Any], split: LayerSplit) -> ResidualWeights[Any]:
    block = residual.block
    if isinstance(block, MoeWeights):
        return residual.with_block(block.of_experts(split.experts))
    if not isinstance(block, FeedForwardWeights) or split.neurons == block.ffn_up.rows:
        return residual
    if split.neurons == 0:
        return ResidualWeights(block.bare().of_neurons(0, 0))
    _check_divisible(residual)
    return residual.with_block(block.of_neurons(0, split.neurons))


def _check_divisible(residual: ResidualWeights[Any]) -> None:
    if residual.post_norm is not None:
        raise ValueError(f"{residual.block.ffn_up.name}: a feed-forward with a post-norm can't be split")


def cpu_part(residual: ResidualWeights[Any], split: LayerSplit) -> ResidualWeights[Any]:
    """The CPU's part of a block; of a block that is on the GPU, its neurons or experts on the CPU.

    It has no down bias if the GPU adds it.
    """
    block = residual.block
    if not split.on_gpu:
        return residual
    if isinstance(block, MoeWeights):
        there = () if split.has_expert_cache else set(split.experts)
        return residual.with_block(
            block.of_experts([i for i in range(block.ffn_up_exps.experts) if i not in there])
        )
    if split.neurons == 0:
        return residual
    _check_divisible(residual)
    part = block.of_neurons(split.neurons, block.ffn_up.rows)
    return residual.with_block(replace(part, ffn_down_bias=None))
