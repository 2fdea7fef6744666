"""How a split model divides its layers between GPU and CPU, and the CPU stages of a decode step."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from edgeinfer_kernels.specification import DecoderSpecification
from edgeinfer_kernels.weights import (
    DecoderWeights,
    ExpertWeights,
    FeedForwardWeights,
    LayerWeights,
)


@dataclass(frozen=True)
class LayerSplit:
    """The parts of one layer that are on the GPU; the CPU has all others.

    Attention and its cache are on the GPU (with the router and the shared expert of an MoE layer), or nothing
    is. Of a dense feed-forward the GPU has the first `neurons`, of an MoE layer the experts listed in
    `experts`. `changing`: the CPU has all experts, so the GPU can replace its experts at run time.
    """

    attention: bool
    neurons: int = 0
    experts: tuple[int, ...] = ()
    changing: bool = False


STEP_TOKENS = 8
"""Minimum number of tokens for which CPU stages are allocated, even if the CPU computes fewer of a prompt."""


def host_batch(batch: int, stream_min_tokens: int | None) -> int:
    """Maximum number of tokens that the CPU computes at a time, in steps of at most `batch`.

    For prompts of at least `stream_min_tokens` tokens its weights are streamed to the GPU; None: never.
    """
    return batch if stream_min_tokens is None else min(batch, max(stream_min_tokens - 1, STEP_TOKENS))


WHOLLY_ON_HOST = LayerSplit(attention=False)


class Block(NamedTuple):
    """One of the two blocks of a layer; for a split feed-forward, the CPU's part."""

    kind: Literal["attention", "feed_forward"]
    layer: int


@dataclass(frozen=True)
class Turns:
    """The CPU stages of a step: the CPU blocks of each stage, and when the GPU runs relative to them.

    Stages are numbered from 1 in execution order. Stage 1 runs before the GPU's first layer and starts with
    the embedding. For each GPU layer (by GPU layer index), `within` is the stage that runs in parallel with
    its feed-forward or replaces it; `behind` is the stage between it and the next GPU layer; 0: none.
    """

    host: tuple[tuple[Block, ...], ...]
    within: tuple[int, ...]
    behind: tuple[int, ...]


def turns_of(weights: DecoderWeights, divisions: Sequence[LayerSplit]) -> Turns:
    """Compute the CPU stages. Consecutive CPU blocks form one stage unless the GPU must add a sum in
    between.
    """
    host: list[list[Block]] = [[]]
    within: list[int] = []
    behind: list[int] = []
    open_turn = True
    for index, (layer, division) in enumerate(zip(weights.layers, divisions, strict=True)):
        if not division.attention:
            if not open_turn:
                host.append([])
                behind[-1] = len(host)
                open_turn = True
            host[-1] += [Block("attention", index), Block("feed_forward", index)]
            continue
        within.append(0)
        behind.append(0)
        open_turn = False
        if has_host_part(layer, division):
            host.append([Block("feed_forward", index)])
            within[-1] = len(host)
            open_turn = not _device_adds(layer, division)
    return Turns(tuple(map(tuple, host)), tuple(within), tuple(behind))


def has_host_part(layer: LayerWeights, division: LayerSplit) -> bool:
    """Whether the CPU computes any part of a layer's feed-forward."""
    second = layer.feed_forward
    if isinstance(second, ExpertWeights):
        return len(division.experts) < second.ffn_up_exps.experts
    return division.neurons < second.ffn_up.rows


def _device_adds(layer: LayerWeights, division: LayerSplit) -> bool:
    """Whether the GPU has a part of the feed-forward to add to the CPU's result."""
    return division.neurons > 0 or isinstance(layer.feed_forward, ExpertWeights)


def device_half(
    specification: DecoderSpecification, weights: DecoderWeights, divisions: Sequence[LayerSplit]
) -> tuple[DecoderSpecification, DecoderWeights]:
    """Specification and weights of the layers that are on the GPU, with only the weights that the GPU has.

    Raises:
        ValueError: a feed-forward with a post-norm would be split.
    """
    chosen = [index for index, division in enumerate(divisions) if division.attention]
    layers = tuple(
        replace(
            weights.layers[i],
            feed_forward=_device_part(weights.layers[i].feed_forward, divisions[i]),
        )
        for i in chosen
    )
    facts = tuple(specification.layers[i] for i in chosen)
    return replace(specification, layers=facts), replace(weights, layers=layers)


def _device_part(
    second: FeedForwardWeights | ExpertWeights, division: LayerSplit
) -> FeedForwardWeights | ExpertWeights:
    if isinstance(second, ExpertWeights):
        return second.of_experts(division.experts)
    neurons = division.neurons
    if neurons in (0, second.ffn_up.rows):
        return second if neurons else second.bare().of_neurons(0, 0)
    _check_divisible(second)
    return second.of_neurons(0, neurons)


def _check_divisible(second: FeedForwardWeights) -> None:
    if second.ffn_post_norm is not None:
        raise ValueError(
            f"{second.ffn_up.name}: has a norm behind its sum and lies on one side, saw it divided"
        )


def host_feed_forward(layer: LayerWeights, division: LayerSplit) -> FeedForwardWeights | ExpertWeights:
    """The CPU's part of the feed-forward of a layer whose attention is on the GPU.

    It has no down bias if the GPU adds it.
    """
    second = layer.feed_forward
    if isinstance(second, ExpertWeights):
        there = () if division.changing else set(division.experts)
        return second.of_experts([i for i in range(second.ffn_up_exps.experts) if i not in there])
    if division.neurons == 0:
        return second
    _check_divisible(second)
    return replace(second.of_neurons(division.neurons, second.ffn_up.rows), ffn_down_bias=None)
