"""The layers of a split model for prefill on the GPU alone: the CPU's weights are streamed.

Matrices stay in host memory, in the host layout; their norms and biases, which are small, are on the device.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from edgeinfer_kernels.cpu.layout.packed_matrix import Bytes
from edgeinfer_kernels.cuda.cache.host_caches import HostCaches
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.offload.device_experts import DeviceExperts, DeviceFeedForward, ExpertStacks
from edgeinfer_kernels.cuda.offload.streamed_matrix import StreamedMatrix
from edgeinfer_kernels.cuda.offload.weight_streamer import WeightStreamer
from edgeinfer_kernels.cuda.weights.device_layers import (
    DeviceAttention,
    DeviceCache,
    LayerBuilder,
    OrderedRows,
    Stack,
)
from edgeinfer_kernels.cuda.weights.device_model import DeviceModel
from edgeinfer_kernels.layer_cache import LayerCache
from edgeinfer_kernels.layer_split import LayerSplit, has_host_part, host_feed_forward
from edgeinfer_kernels.sizes.cuda_buffers import sent_piece_bytes
from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from edgeinfer_kernels.specification import DecoderSpecification, LayerSpecification
from edgeinfer_kernels.weights import DecoderWeights, ExpertWeights, FeedForwardWeights, Matrix


class StreamingHost(Protocol):
    """The host whose weights are streamed, as `edgeinfer_kernels.cpu.cpu_shard.CpuShard`."""

    @property
    def caches(self) -> Mapping[int, LayerCache]:
        """The caches of the layers with attention on the CPU, by layer index."""
        ...

    def memory_of(self, matrix: Matrix) -> Bytes:
        """The bytes of a matrix in the kernel layout."""
        ...


@dataclass(frozen=True)
class PromptLayer:
    """One layer of a prefill. `cache` None: it is on the host, for layer `index`.

    `second`: the parts of a dense feed-forward (empty: a CPU stage computes it), or an MoE block together
    with its `sent` (streamed) experts.
    """

    index: int
    facts: LayerSpecification
    attention: DeviceAttention
    cache: DeviceCache | None
    second: tuple[DeviceFeedForward, ...] | DeviceExperts
    sent: ExpertStacks | None = None

    @property
    def norm(self) -> DeviceFeedForward | DeviceExperts | None:
        """The part that has the norm before the feed-forward; None: not on the device."""
        if isinstance(self.second, DeviceExperts):
            return self.second
        return next((part for part in self.second if part.norm is not None), None)


def device_layers(model: DeviceModel) -> list[PromptLayer]:
    """The device's layers, with its weights only."""
    found = []
    for index, (facts, layer) in enumerate(zip(model.specification.layers, model.layers, strict=True)):
        second = layer.feed_forward
        parts = second if isinstance(second, DeviceExperts) else (second,) if second.hidden else ()
        found.append(PromptLayer(index, facts, layer.attention, layer.cache, parts))
    return found


class StreamedLayers(LayerBuilder):
    """All layers of the whole decoder; `divisions` defines which parts `model` already has.

    `least_tokens`: minimum prompt tokens for streaming. Nothing is streamed before `connect`.
    """

    def __init__(
        self,
        specification: DecoderSpecification,
        weights: DecoderWeights,
        divisions: Sequence[LayerSplit],
        model: DeviceModel,
        arena: Arena,
        least_tokens: int,
    ) -> None:
        super().__init__(arena, model.positions, model.tables)
        self.least_tokens = least_tokens
        self._matrices: list[StreamedMatrix] = []
        self.sender = WeightStreamer(arena, sent_piece_bytes(ModelSizes.of(specification, weights)))
        theirs = iter(model.layers)
        self.layers = []
        parts = zip(specification.layers, weights.layers, divisions, strict=True)
        for index, (facts, layer, division) in enumerate(parts):
            second: tuple[DeviceFeedForward, ...] | DeviceExperts
            if not division.attention:
                assert isinstance(layer.feed_forward, FeedForwardWeights), "see can_send"
                second = (self._feed_forward(layer.feed_forward),)
                attention = self._attention(layer, facts.attention)
                self.layers.append(PromptLayer(index, facts, attention, None, second))
                continue
            own = next(theirs)
            second = own.feed_forward if isinstance(own.feed_forward, DeviceExperts) else ()
            if isinstance(own.feed_forward, DeviceFeedForward) and own.feed_forward.hidden:
                second = (own.feed_forward,)
            rest = host_feed_forward(layer, division) if has_host_part(layer, division) else None
            sent = self._stacks(rest) if isinstance(rest, ExpertWeights) else None
            if isinstance(rest, FeedForwardWeights) and not isinstance(second, DeviceExperts):
                second = (*second, self._feed_forward(rest))
            self.layers.append(PromptLayer(index, facts, own.attention, own.cache, second, sent))
        hosts = {layer.index: layer.facts.attention for layer in self.layers if layer.cache is None}
        self.caches = HostCaches(hosts, self.positions, arena)

    def _matrix(self, source: Matrix) -> StreamedMatrix:
        self._matrices.append(StreamedMatrix.of(source))
        return self._matrices[-1]

    def _stack(self, matrices: Sequence[OrderedRows]) -> Stack:
        """Each matrix separately, in the host layout."""
        found = []
        for matrix, order in matrices:
            ordered = None
            if order is not None and (np.diff(order) < 0).any():
                ordered = self._arena.take(order.shape, torch.int64)
                self._vectors.append((ordered, order))
            found.append(StreamedMatrix.of(matrix, ordered))
        self._matrices += found
        return Stack(tuple(found))

    def _stacks(self, w: ExpertWeights) -> ExpertStacks:
        gate, up, down = map(self._matrix, (w.ffn_gate_exps, w.ffn_up_exps, w.ffn_down_exps))
        biases = (w.ffn_gate_exps_bias, w.ffn_up_exps_bias, w.ffn_down_exps_bias)
        return ExpertStacks(w.ffn_up_exps.experts, gate, up, down, *map(self._vector, biases))

    def connect(self, host: StreamingHost) -> int:
        """Set the host whose weights and caches are used; return how many bytes of weights could not be
        pinned.
        """
        self.caches.connect(host.caches)
        self.sender.pin(self.caches.memories())
        return self.sender.connect(
            [matrix.connect(host.memory_of(matrix.source)) for matrix in self._matrices]
        )

    def close(self) -> None:
        """Release pinned memory."""
        self.sender.close()


def can_send(weights: DecoderWeights, divisions: Sequence[LayerSplit]) -> bool:
    """Whether all CPU weights can be streamed: the router of an MoE layer must be on the device."""
    return all(
        division.attention or isinstance(layer.feed_forward, FeedForwardWeights)
        for layer, division in zip(weights.layers, divisions, strict=True)
    )
