"""The blocks of a split model for prefill on the GPU alone: the CPU's weights are streamed.

Matrices stay in host memory, in the host layout; their norms and biases, which are small, are on the device.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch

from edgeinfer_kernels.blocks.common.block import BlockState
from edgeinfer_kernels.blocks.moe import MoeSpec, MoeWeights
from edgeinfer_kernels.cpu.layout.neuron_layout import MemoryOrder
from edgeinfer_kernels.cuda.blocks import device_module
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.offload.streamed_matrix import StreamedMatrix
from edgeinfer_kernels.cuda.offload.weight_streamer import WeightStreamer
from edgeinfer_kernels.cuda.prefill.prompt_blocks import PromptBlock
from edgeinfer_kernels.cuda.weights.device_block import DeviceBlock
from edgeinfer_kernels.cuda.weights.device_builder import DeviceBuilder, OrderedRows, Stack
from edgeinfer_kernels.cuda.weights.device_model import DeviceModel
from edgeinfer_kernels.cuda.weights.moe_weights import ExpertStacks
from edgeinfer_kernels.decoder import (
    BlockIndex,
    DecoderSpec,
    DecoderWeights,
    ResidualBlock,
    ResidualWeights,
    blocks_of,
)
from edgeinfer_kernels.matrix import Matrix
from edgeinfer_kernels.pages import Bytes
from edgeinfer_kernels.recurrent_state import StateSlots
from edgeinfer_kernels.sizes.cuda_buffers import streamed_piece_bytes
from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from edgeinfer_kernels.stages import CPU, Shard, Stage, part_of_block, shards_on


class StreamingHost(Protocol):
    """The host whose weights are streamed, as `edgeinfer_kernels.cpu.cpu_shard.CpuShard`."""

    @property
    def states(self) -> Mapping[BlockIndex, BlockState]:
        """The states of the blocks on the CPU."""
        ...

    @property
    def slots(self) -> StateSlots | None:
        """The slots of recurrent states; None: there is none."""
        ...

    def memory_of(self, matrix: Matrix) -> Bytes:
        """The bytes of a matrix in the kernel layout."""
        ...

    def order_of(self, matrix: Matrix) -> MemoryOrder:
        """How they are stored."""
        ...


class StreamedLayers(DeviceBuilder):
    """All blocks of the whole decoder; the parts on the CPU are those of `stages`, the others `model` has.

    `min_tokens`: minimum prompt tokens for streaming. Nothing is streamed before `connect`.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        weights: DecoderWeights,
        stages: Sequence[Stage],
        model: DeviceModel,
        arena: Arena,
        min_tokens: int,
    ) -> None:
        super().__init__(arena, model.positions, model.tables)
        self.min_tokens = min_tokens
        self._matrices: list[StreamedMatrix] = []
        self.sender = WeightStreamer(arena, streamed_piece_bytes(ModelSizes.of(spec, weights)))
        own, on_cpu = iter(model.blocks), shards_on(CPU, stages)
        self.blocks = []
        for index, residual, w in blocks_of(spec, weights):
            shard = on_cpu.get(index.layer)
            if shard is not None and shard.undivided:
                self.blocks.append(self._streamed(index, residual, w))
            else:
                self.blocks.append(self._with_streamed_part(index, next(own), w, shard))
        self.host_states: dict[str, Any] = {}
        """The states on the host, by block kind."""
        self.host_slots: StateSlots | None = None
        """The slots of the recurrent ones."""
        for kind in dict.fromkeys(block.residual.block.kind for block in self.blocks):
            module, specs = device_module(kind), self._on_host(kind)
            if specs and hasattr(module, "HostStates"):
                self.host_states[kind] = module.HostStates(specs, self.positions, arena)

    def _on_host(self, kind: str) -> dict[BlockIndex, Any]:
        """The specifications of the blocks of a kind that have no state on the device."""
        of_kind = [block for block in self.blocks if block.residual.block.kind == kind]
        return {block.index: block.residual.block for block in of_kind if block.state is None}

    def _streamed(
        self, index: BlockIndex, residual: ResidualBlock[Any], w: ResidualWeights[Any]
    ) -> PromptBlock:
        """A block that is wholly on the CPU."""
        norms, module = self.norms(w), device_module(residual.block.kind)
        return PromptBlock(index, residual, (module.take(self, residual.block, w.block),), norms)

    def _with_streamed_part(
        self, index: BlockIndex, own: DeviceBlock, w: ResidualWeights[Any], shard: Shard | None
    ) -> PromptBlock:
        """A block on the device, with its part in the layer's shard on the CPU."""
        parts, norms, experts = (own.weights,) if own.has_granules else (), own.norms, None
        if shard is not None and own.residual.block.is_divisible:
            remainder = part_of_block(w, shard)
            if isinstance(remainder.block, MoeWeights):
                experts = self._stacks(remainder.block)
            else:
                norms = own.norms if own.has_granules else self.norms(remainder)
                module = device_module(own.residual.block.kind)
                parts = (*parts, module.take(self, own.residual.block, remainder.block))
        return PromptBlock(index, own.residual, parts, norms, own.state, experts)

    def matrix(self, source: Matrix) -> StreamedMatrix:
        self._matrices.append(StreamedMatrix.of(source))
        return self._matrices[-1]

    def stack(self, matrices: Sequence[OrderedRows]) -> Stack:
        """Each matrix separately, in the host layout."""
        streamed = []
        for matrix, order in matrices:
            ordered = None
            if order is not None and (np.diff(order) < 0).any():
                ordered = self._arena.take(order.shape, torch.int64)
                self._vectors.append((ordered, order))
            streamed.append(StreamedMatrix.of(matrix, ordered))
        self._matrices += streamed
        return Stack(tuple(streamed))

    def _stacks(self, w: MoeWeights) -> ExpertStacks:
        gate = None if w.ffn_gate_exps is None else self.matrix(w.ffn_gate_exps)
        up, down = self.matrix(w.ffn_up_exps), self.matrix(w.ffn_down_exps)
        biases = (w.ffn_gate_exps_bias, w.ffn_up_exps_bias, w.ffn_down_exps_bias)
        return ExpertStacks(w.ffn_up_exps.experts, gate, up, down, *map(self.vector, biases))

    def connect(self, host: StreamingHost) -> int:
        """Set the host whose weights and caches are used; return how many bytes of weights could not be
        pinned.
        """
        for kind, states in self.host_states.items():
            found = self._on_host(kind)
            here = {index: state for index, state in host.states.items() if index in found}
            states.connect(here, host.slots)
        self.host_slots = host.slots
        self.sender.pin([memory for states in self.host_states.values() for memory in states.memories()])
        return self.sender.connect(
            [
                matrix.connect(host.memory_of(matrix.source), host.order_of(matrix.source))
                for matrix in self._matrices
            ]
        )

    def close(self) -> None:
        """Release pinned memory."""
        self.sender.close()


def can_stream(spec: DecoderSpec, stages: Sequence[Stage]) -> bool:
    """Whether the CPU has weights, and all can be streamed: routers of MoE blocks must be on the device."""
    shards = shards_on(CPU, stages)
    routed = {index.layer for index in spec.indices() if isinstance(spec.residual(index).block, MoeSpec)}
    return bool(stages) and not any(shard.undivided and layer in routed for layer, shard in shards.items())
