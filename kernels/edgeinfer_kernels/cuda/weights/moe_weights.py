"""The weights of an MoE block on the device, and the buffers for its routing."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edgeinfer_kernels.blocks.moe import MoeSpec, MoeWeights
from edgeinfer_kernels.cuda.blocks.feed_forward import DeviceFeedForward
from edgeinfer_kernels.cuda.blocks.feed_forward import take as take_feed_forward
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.weights.device_builder import DeviceBuilder
from edgeinfer_kernels.cuda.weights.packing import DeviceMatrix
from edgeinfer_kernels.cuda.weights.plane_formats import ROW_MULTIPLE, UnsupportedOnDeviceError
from edgeinfer_kernels.matrix import Matrix
from edgeinfer_kernels.sizes.cuda_matrices import padded_rows
from edgeinfer_kernels.stages import Shard


@dataclass(frozen=True)
class ExpertStacks:
    """The stacked matrices of some experts, and their stacked biases; gate None: there is none."""

    count: int
    gate: DeviceMatrix | None
    up: DeviceMatrix
    down: DeviceMatrix
    gate_bias: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None

    @property
    def matrices(self) -> Sequence[DeviceMatrix]:
        return [*([] if self.gate is None else [self.gate]), self.up, self.down]


@dataclass(frozen=True)
class DeviceExperts:
    """The experts' stacked matrices, and the router: as a matrix for decode steps, as floats for prefill.

    `here`: number of experts on the device; `slots` (2, experts) int32: slot of
    each expert on the device, and on the host, -1: absent. `has_expert_cache`: the host has all experts, and
    those on the device can be replaced. `hidden`: elements of an expert's hidden row. `shared` is a
    feed-forward for every token, `shared_router` the row of its gate. `selection_bias`: `exp_probs_b`.
    `latent_down`, `latent_up`: the latent projection that the experts read, and the one back. The vectors
    after them are those of `MoeWeights`.
    """

    count: int
    experts_per_token: int
    here: int
    slots: Tensor
    hidden: int
    router: DeviceMatrix
    router_rows: Tensor
    router_bias: Tensor | None
    selection_bias: Tensor | None
    gate: DeviceMatrix | None
    up: DeviceMatrix
    down: DeviceMatrix
    gate_bias: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None
    shared: DeviceFeedForward | None
    shared_router: DeviceMatrix | None
    shared_router_rows: Tensor | None
    latent_down: DeviceMatrix | None
    latent_up: DeviceMatrix | None
    shared_input_norm: Tensor | None = None
    shared_norm: Tensor | None = None
    expert_norm: Tensor | None = None
    expert_scales: Tensor | None = None
    has_expert_cache: bool = False

    @property
    def all_slots(self) -> int:
        """Number of slots on the device plus those on the host; with an expert cache some are empty."""
        return self.here + self.count if self.has_expert_cache else self.count

    @property
    def stacks(self) -> ExpertStacks:
        """The experts on the device."""
        biases = self.gate_bias, self.up_bias, self.down_bias
        return ExpertStacks(self.here, self.gate, self.up, self.down, *biases)

    @property
    def shared_neurons(self) -> int:
        return 0 if self.shared is None else self.shared.neurons

    @property
    def inputs(self) -> Sequence[DeviceMatrix]:
        matrices = [self.up, *([] if self.gate is None else [self.gate]), self.router]
        matrices += [] if self.shared is None else self.shared.inputs
        matrices += [] if self.latent_down is None else [self.latent_down]
        return matrices if self.shared_router is None else [*matrices, self.shared_router]

    @property
    def outputs(self) -> Sequence[DeviceMatrix]:
        matrices = [self.down, *([] if self.shared is None else self.shared.outputs)]
        return matrices if self.latent_up is None else [*matrices, self.latent_up]


def check_expert_rows(w: MoeWeights) -> None:
    """Raise `UnsupportedOnDeviceError` if an expert's rows do not fill whole programs."""
    for stack in w.stacks():
        if stack.rows % ROW_MULTIPLE:
            raise UnsupportedOnDeviceError(
                f"{stack.name}: {stack.rows} rows per expert, the GPU kernels need a multiple of "
                f"{ROW_MULTIPLE}"
            )


class RoutingSpace:
    """Buffers for the scores, expert ids and weights of at most `tokens` tokens, shared by all MoE blocks."""

    def __init__(self, specs: Sequence[MoeSpec], arena: Arena, tokens: int) -> None:
        self.count = max((spec.experts for spec in specs), default=0)
        self.experts_per_token = experts_per_token = max(
            (spec.experts_per_token for spec in specs), default=0
        )
        padded = -(-self.count // ROW_MULTIPLE) * ROW_MULTIPLE
        self.scores = arena.take((tokens, padded), torch.float32)
        self.ids = arena.take((tokens * experts_per_token,), torch.int32)
        self.weights = arena.take((tokens * experts_per_token,), torch.float32)
        self.shared_scores = arena.take((tokens, ROW_MULTIPLE if experts_per_token else 0), torch.float32)


def take(builder: DeviceBuilder, spec: MoeSpec, w: MoeWeights, shards: Sequence[Shard] = ()) -> DeviceExperts:
    """Allocate the weights of an MoE block, or of its experts on the device.

    `shards`: of its layer, on the device and on the host; none: all experts are on the device. Raises
    `UnsupportedOnDeviceError`.
    """
    check_expert_rows(w)
    shared_router = None
    if w.ffn_gate_inp_shexp is not None:
        row = np.ascontiguousarray(w.ffn_gate_inp_shexp, np.float32)
        shared_router = Matrix("ffn_gate_inp_shexp", "F32", 1, len(row), row.view(np.uint8)[None])
    return DeviceExperts(
        count=spec.experts,
        experts_per_token=spec.experts_per_token,
        here=w.ffn_up_exps.experts,
        slots=builder.integers(_slots(spec.experts, shards)),
        hidden=w.ffn_up_exps.rows,
        router=builder.matrix(w.ffn_gate_inp),
        router_rows=builder.floats(w.ffn_gate_inp),
        router_bias=builder.vector(w.ffn_gate_inp_bias, padded_rows(w.ffn_gate_inp.rows)),
        selection_bias=builder.vector(w.exp_probs_b),
        gate=None if w.ffn_gate_exps is None else builder.matrix(w.ffn_gate_exps),
        up=builder.matrix(w.ffn_up_exps),
        down=builder.matrix(w.ffn_down_exps),
        gate_bias=builder.vector(w.ffn_gate_exps_bias),
        up_bias=builder.vector(w.ffn_up_exps_bias),
        down_bias=builder.vector(w.ffn_down_exps_bias),
        shared=None if w.shared is None else take_feed_forward(builder, None, w.shared),
        shared_router=None if shared_router is None else builder.matrix(shared_router),
        shared_router_rows=None if shared_router is None else builder.floats(shared_router),
        latent_down=None if w.ffn_latent_down is None else builder.matrix(w.ffn_latent_down),
        latent_up=None if w.ffn_latent_up is None else builder.matrix(w.ffn_latent_up),
        shared_input_norm=builder.vector(w.shared_input_norm),
        shared_norm=builder.vector(w.shared_norm),
        expert_norm=builder.vector(w.expert_norm),
        expert_scales=builder.vector(w.expert_scales),
        has_expert_cache=any(shard.holds_all for shard in shards),
    )


def _slots(count: int, shards: Sequence[Shard]) -> npt.NDArray[np.int32]:
    """(2, count): slot of each expert on the device, and on the host; -1: it isn't computed there."""
    slots = np.full((2, count), -1, np.int32)
    if not shards:
        slots[0] = np.arange(count)
    for row, shard in zip(slots, shards, strict=False):
        row[list(shard.experts)] = shard.experts if shard.holds_all else np.arange(len(shard.experts))
    return slots
