"""How a decoder is divided between a device and its host: what of each layer lies where, whose turn it is."""

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
    """What of one layer lies on the device; all else is the host's.

    Attention and its cache do (with them a mixture's router and shared expert), or nothing does. Of a dense
    feed-forward the first `neurons` are there, of a mixture the experts numbered in `experts`. `changing`:
    the host has all experts, so that others may take the places of those.
    """

    attention: bool
    neurons: int = 0
    experts: tuple[int, ...] = ()
    changing: bool = False


STEP_TOKENS = 8
"""Tokens of a step that the host takes its turns of, however few it is to compute of a prompt."""


def host_batch(batch: int, stream_min_tokens: int | None) -> int:
    """Tokens that the CPU computes at a time, in steps of at most `batch`. For prompts of `stream_min_tokens` and
    more, its weights are streamed to the GPU; None: never.
    """
    return batch if stream_min_tokens is None else min(batch, max(stream_min_tokens - 1, STEP_TOKENS))


WHOLLY_ON_HOST = LayerSplit(attention=False)


class Block(NamedTuple):
    """One of a layer's two blocks; of a divided feed-forward the host's part."""

    kind: Literal["attention", "feed_forward"]
    layer: int


@dataclass(frozen=True)
class Turns:
    """A token's way between the two: the host's blocks of each turn, and where on the device it has them.

    Turns are numbered from 1 in their order. The first is before the device's first layer and begins with the
    embedding. `within` and `behind` tell for each of the device's layers (by their place among these) the
    turn while or in place of its feed-forward, and the one between it and the next layer; 0: none.
    """

    host: tuple[tuple[Block, ...], ...]
    within: tuple[int, ...]
    behind: tuple[int, ...]


def turns_of(weights: DecoderWeights, divisions: Sequence[LayerSplit]) -> Turns:
    """Host blocks that follow each other are one turn, as far as no sum has to be made on the device."""
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
    """Whether the host computes any of a layer's feed-forward."""
    second = layer.feed_forward
    if isinstance(second, ExpertWeights):
        return len(division.experts) < second.ffn_up_exps.experts
    return division.neurons < second.ffn_up.rows


def _device_adds(layer: LayerWeights, division: LayerSplit) -> bool:
    """Whether the device has a part of a feed-forward to add to the host's."""
    return division.neurons > 0 or isinstance(layer.feed_forward, ExpertWeights)


def device_half(
    specification: DecoderSpecification, weights: DecoderWeights, divisions: Sequence[LayerSplit]
) -> tuple[DecoderSpecification, DecoderWeights]:
    """The layers that have anything on the device, with what of their weights lies there.

    Raises:
        ValueError: a feed-forward with a norm behind its sum is to be divided.
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
    """What the host has of the feed-forward of a layer whose attention is on the device; without what is
    added behind down where the device adds it.
    """
    second = layer.feed_forward
    if isinstance(second, ExpertWeights):
        there = () if division.changing else set(division.experts)
        return second.of_experts([i for i in range(second.ffn_up_exps.experts) if i not in there])
    if division.neurons == 0:
        return second
    _check_divisible(second)
    return replace(second.of_neurons(division.neurons, second.ffn_up.rows), ffn_down_bias=None)
