"""A mixture of experts' weights as they lie on the device, and the buffers that a step needs for it."""

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
    """A dense feed-forward; vectors are None where there is nothing to do."""

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
        """The matrices that are multiplied with the normed row."""
        return [self.up] if self.gate is None else [self.up, self.gate]

    @property
    def downs(self) -> list[DeviceMatrix]:
        return [self.down]


@dataclass(frozen=True)
class ExpertStacks:
    """The matrices of some experts, those of a kind on top of each other, and their biases likewise."""

    count: int
    gate: DeviceMatrix
    up: DeviceMatrix
    down: DeviceMatrix
    gate_bias: Tensor | None
    up_bias: Tensor | None
    down_bias: Tensor | None


@dataclass(frozen=True)
class DeviceExperts:
    """Experts' matrices on top of each other, and the router: as a matrix for steps, as floats for prompts.

    `here`: how many experts are on the device; `places` (2, experts) int32: where each lies among these, and
    among those of the host, -1: it doesn't. `changing`: the host has all of them, and those of the device may
    become others. `hidden`: elements of an expert's hidden row. `shared` is a feed-forward for every token,
    `shared_router` one row that says how much of it.
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
        """Places on the device, and those on the host behind them; of changing experts some are empty."""
        return self.here + self.count if self.changing else self.count

    @property
    def stacks(self) -> ExpertStacks:
        """The experts that are here."""
        biases = self.gate_bias, self.up_bias, self.down_bias
        return ExpertStacks(self.here, self.gate, self.up, self.down, *biases)

    @property
    def shared_hidden(self) -> int:
        return 0 if self.shared is None else self.shared.hidden

    @property
    def entered(self) -> list[DeviceMatrix]:
        """The matrices that are multiplied with the normed row."""
        found = [self.up, self.gate, self.router]
        found += [] if self.shared is None else self.shared.entered
        return found if self.shared_router is None else [*found, self.shared_router]

    @property
    def downs(self) -> list[DeviceMatrix]:
        return [self.down, *([] if self.shared is None else self.shared.downs)]


def check_expert_rows(w: ExpertWeights) -> None:
    """Raises `UnsupportedOnDeviceError` where an expert's rows don't fill whole programs."""
    for stack in w.stacks():
        if stack.rows % ROW_MULTIPLE:
            raise UnsupportedOnDeviceError(
                f"{stack.name}: {stack.rows} rows an expert, the GPU's kernels want a multiple of "
                f"{ROW_MULTIPLE}"
            )


class RoutingSpace:
    """Scores, chosen experts and their weights of at most `tokens` tokens, for all layers in turn."""

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
    """Those of the layers that have experts."""
    facts = [layer.feed_forward for layer in specification.layers]
    return [fact for fact in facts if isinstance(fact, ExpertsSpecification)]
