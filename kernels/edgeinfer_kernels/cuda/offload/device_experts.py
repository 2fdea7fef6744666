"""The weights of an MoE block on the device, and the buffers that a step needs for it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.weights.packing import DeviceMatrix
from edgeinfer_kernels.cuda.weights.plane_formats import ROW_MULTIPLE, UnsupportedOnDeviceError
from edgeinfer_kernels.specification import DecoderSpecification, ExpertsSpecification
from edgeinfer_kernels.weights import ExpertWeights


@dataclass(frozen=True)
class DeviceFeedForward:
    """A dense feed-forward; vectors are None if they are not needed."""

    gate: DeviceMatrix | None
    up: DeviceMatrix
    down: DeviceMatrix
    gate_bias: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None
    norm: Tensor | None
    norm_bias: Tensor | None
    post_norm: Tensor | None

    @property
    def hidden(self) -> int:
        """Elements of a hidden row."""
        return self.up.shapes.rows

    @property
    def shared_hidden(self) -> int:
        return 0

    @property
    def entered(self) -> list[DeviceMatrix]:
        """The matrices that are multiplied with the normed input."""
        return [self.up] if self.gate is None else [self.up, self.gate]

    @property
    def downs(self) -> list[DeviceMatrix]:
        return [self.down]


@dataclass(frozen=True)
class ExpertStacks:
    """The stacked matrices of some experts, and their stacked biases."""

    count: int
    gate: DeviceMatrix
    up: DeviceMatrix
    down: DeviceMatrix
    gate_bias: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None


@dataclass(frozen=True)
class DeviceExperts:
    """The experts' stacked matrices, and the router: as a matrix for decode steps, as floats for prefill.

    `here`: number of experts on the device; `places` (2, experts) int32: slot of each expert on the device,
    and on the host, -1: absent. `changing`: the host has all experts, and those on the device can be
    replaced. `hidden`: elements of an expert's hidden row. `shared` is a feed-forward for every token,
    `shared_router` the row of its gate.
    """

    count: int
    here: int
    places: Tensor
    hidden: int
    router: DeviceMatrix
    router_rows: Tensor
    router_bias: Tensor | None
    gate: DeviceMatrix
    up: DeviceMatrix
    down: DeviceMatrix
    gate_bias: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None
    norm: Tensor | None
    shared: DeviceFeedForward | None
    shared_router: DeviceMatrix | None
    shared_router_rows: Tensor | None
    norm_bias: None = None
    changing: bool = False

    @property
    def all_places(self) -> int:
        """Number of slots on the device plus those on the host; with changing experts some are empty."""
        return self.here + self.count if self.changing else self.count

    @property
    def stacks(self) -> ExpertStacks:
        """The experts on the device."""
        biases = self.gate_bias, self.up_bias, self.down_bias
        return ExpertStacks(self.here, self.gate, self.up, self.down, *biases)

    @property
    def shared_hidden(self) -> int:
        return 0 if self.shared is None else self.shared.hidden

    @property
    def entered(self) -> list[DeviceMatrix]:
        """The matrices that are multiplied with the normed input."""
        found = [self.up, self.gate, self.router]
        found += [] if self.shared is None else self.shared.entered
        return found if self.shared_router is None else [*found, self.shared_router]

    @property
    def downs(self) -> list[DeviceMatrix]:
        return [self.down, *([] if self.shared is None else self.shared.downs)]


def check_expert_rows(w: ExpertWeights) -> None:
    """Raise `UnsupportedOnDeviceError` if an expert's rows do not fill whole programs."""
    for stack in w.stacks():
        if stack.rows % ROW_MULTIPLE:
            raise UnsupportedOnDeviceError(
                f"{stack.name}: {stack.rows} rows an expert, the GPU's kernels want a multiple of "
                f"{ROW_MULTIPLE}"
            )


class RoutingSpace:
    """Buffers for the scores, expert ids and weights of at most `tokens` tokens, shared by all layers."""

    def __init__(self, specification: DecoderSpecification, arena: Arena, tokens: int) -> None:
        facts = expert_facts(specification)
        self.count = max((fact.count for fact in facts), default=0)
        used = max((fact.used for fact in facts), default=0)
        padded = -(-self.count // ROW_MULTIPLE) * ROW_MULTIPLE
        self.used = used
        self.scores = arena.take((tokens, padded), torch.float32)
        self.ids = arena.take((tokens * used,), torch.int32)
        self.weights = arena.take((tokens * used,), torch.float32)
        self.shared_scores = arena.take((tokens, ROW_MULTIPLE if used else 0), torch.float32)


def expert_facts(specification: DecoderSpecification) -> Sequence[ExpertsSpecification]:
    """The specifications of the MoE layers."""
    facts = [layer.feed_forward for layer in specification.layers]
    return [fact for fact in facts if isinstance(fact, ExpertsSpecification)]
