"""Splits of a decoder between the CPU and one GPU, layer by layer, and the stages that follow."""

from collections.abc import Sequence
from typing import NamedTuple

from edgeinfer_kernels.blocks.feed_forward import FeedForwardSpec
from edgeinfer_kernels.blocks.moe import MoeSpec
from edgeinfer_kernels.decoder import DecoderSpec, LayerSpec
from edgeinfer_kernels.stages import Stage
from edgeinfer_offload.planner.layer_placement import LayerPlacement, plan_stages


class LayerSplit(NamedTuple):
    """The parts of one layer that are on the GPU; the CPU has all others.

    `on_gpu`: the undivided blocks are, otherwise nothing is. Of a feed-forward the GPU has the first
    `neurons`, of an MoE block the `experts`; with `has_expert_cache`, the CPU has all experts.
    """

    on_gpu: bool
    neurons: int = 0
    experts: tuple[int, ...] = ()
    has_expert_cache: bool = False


def stages_of(spec: DecoderSpec, splits: Sequence[LayerSplit]) -> tuple[Stage, ...]:
    """The stages of a planner's placement; the embedding is on the CPU, the head on the GPU."""
    layers = [_placement(layer, split) for layer, split in zip(spec.layers, splits, strict=True)]
    return plan_stages(layers, "gpu", "cpu")


def _placement(layer: LayerSpec, split: LayerSplit) -> LayerPlacement:
    device = "gpu" if split.on_gpu else "cpu"
    block = next((each.block for each in layer.blocks if each.block.is_divisible), None)
    if isinstance(block, MoeSpec):
        return LayerPlacement(
            device,
            device,
            gpu_experts=split.experts,
            experts=block.experts,
            expert_cache=split.has_expert_cache,
        )
    if not isinstance(block, FeedForwardSpec):
        return LayerPlacement(device, device)
    is_joined = layer.blocks[-1].block is not block
    return LayerPlacement(
        device, device, hot_neurons=split.neurons, neurons=block.neurons, is_joined=is_joined
    )
