"""The host's turns in a decoder that is divided: who takes them, and how a step and a prompt hand over."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from edgeinfer_kernels.cpu.runtime.abi import MAILBOX
from edgeinfer_kernels.cuda.decode.step_launches import StepLaunches
from edgeinfer_kernels.cuda.decode.step_norms import NextNorm
from edgeinfer_kernels.cuda.decode.workspace import LOST_AT, Activations
from edgeinfer_kernels.cuda.offload.exchange_buffer import ExchangeBuffer
from edgeinfer_kernels.cuda.offload.exchange_kernels import receive_kernel, send_kernel
from edgeinfer_kernels.cuda.tuning.step_shapes import next_power_of_two
from edgeinfer_kernels.layer_split import Turns


class Host(Protocol):
    """The host's half, as `edgeinfer_kernels.cpu.cpu_shard.CpuShard`."""

    def serve(self, tokens: int, start: int) -> None:
        """All turns of a step, each as soon as the device has come to it."""
        ...

    def take_turn(self, turn: int, tokens: int, start: int) -> None:
        """One turn, now."""
        ...


class DecodeExchange:
    """Launches what a decode step does at the host's turns.

    `between`, where it is set, is called with the turn when everything has been launched that goes before the
    host's answer: off CUDA, and where a device can't wait within a graph.
    """

    def __init__(self, turns: Turns, mailbox: ExchangeBuffer) -> None:
        self.turns = turns
        self.mailbox = mailbox
        self.between: Callable[[int], None] | None = None

    def _word(self, at: int) -> Tensor:
        return self.mailbox.words[at // 8 :]

    def send(
        self, launches: StepLaunches, turn: int, tokens: int, used: int = 0, places: Tensor | None = None
    ) -> None:
        """x to the host, and of a mixture what has been chosen: `used` experts, which lie at `places`."""
        space, box, width = launches.workspace, self.mailbox, launches.model.specification.width
        routing = space.routing
        launches.launch(
            send_kernel,
            (1,),
            space.x,
            box.rows,
            self._word(MAILBOX.sent),
            turn,
            routing.ids if used else space.state,
            routing.weights if used else space.x,
            space.state if places is None else places,
            box.ids if used else box.words,
            box.weights if used else box.rows,
            WIDTH=width,
            STRIDE=box.rows.shape[1],
            TOKENS=tokens,
            USED=used,
            COUNT=0 if places is None else places.shape[1],
            warps=8,
        )

    def receive(
        self,
        launches: StepLaunches,
        turn: int,
        y: Tensor | None,
        scale: float,
        norm: NextNorm,
        out: Activations,
        tokens: int,
    ) -> None:
        """x = the host's rows + scale·y; then its norm into `out`."""
        if self.between is not None:
            self.between(turn)
        space, box, width = launches.workspace, self.mailbox, launches.model.specification.width
        launches.launch(
            receive_kernel,
            (tokens,),
            self._word(MAILBOX.answered),
            self._word(MAILBOX.lost),
            turn,
            space.state[LOST_AT:],
            box.rows,
            space.y if y is None else y,
            space.y.stride(0),
            scale,
            space.x,
            launches.or_nothing(norm.weight),
            launches.or_nothing(norm.bias),
            norm.facts.epsilon,
            out.words,
            WIDTH=width,
            STRIDE=box.rows.shape[1],
            GROUPS=next_power_of_two(-(-width // 16)),
            BLOCKS=out.blocks,
            PLANES=out.planes,
            ADDS=y is not None,
            NORM=norm.weight is not None,
            LAYER=norm.facts.kind == "layer",
            BIAS=norm.bias is not None,
            warps=8,
        )


class PrefillExchange:
    """Hands a chunk of a prompt to the host and takes it back, with copies that the host waits for."""

    def __init__(self, turns: Turns, mailbox: ExchangeBuffer, device: torch.device) -> None:
        self.turns = turns
        self.host: Host | None = None
        self._mailbox = mailbox
        self._sent = torch.cuda.Event() if device.type == "cuda" else None

    def send(self, x: Tensor, ids: Tensor | None = None, weights: Tensor | None = None) -> None:
        """The rows, and where the host has the chosen experts; returns at once."""
        box, (tokens, width) = self._mailbox, x.shape
        box.rows[:tokens, :width].copy_(x, non_blocking=True)
        if ids is not None and weights is not None:
            box.ids[: len(ids)].copy_(ids, non_blocking=True)
            box.weights[: len(weights)].copy_(weights, non_blocking=True)
        if self._sent is not None:
            self._sent.record()

    def receive(self, turn: int, x: Tensor, start: int) -> None:
        """Wait for what was sent, let the host take its turn, and bring its rows back."""
        assert self.host is not None
        if self._sent is not None:
            self._sent.synchronize()
        self.host.take_turn(turn, len(x), start)
        self.fetch(x)

    def fetch(self, x: Tensor) -> None:
        """The rows as they lie in the mailbox."""
        tokens, width = x.shape
        x.copy_(self._mailbox.rows[:tokens, :width], non_blocking=True)


@dataclass(frozen=True)
class PromptTurn:
    """One of a prompt's turns."""

    turns: PrefillExchange
    number: int

    def send(self, x: Tensor, ids: Tensor | None = None, weights: Tensor | None = None) -> None:
        """See `PrefillExchange.send`."""
        self.turns.send(x, ids, weights)

    def receive(self, x: Tensor, start: int) -> None:
        """See `PrefillExchange.receive`."""
        self.turns.receive(self.number, x, start)
