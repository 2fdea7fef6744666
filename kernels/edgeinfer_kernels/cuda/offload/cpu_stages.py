"""The CPU stages of a split model: the host interface, and the exchange during decode and prefill."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from edgeinfer_kernels.cpu.runtime.kernel_args import ANSWERED, LOST, SENT
from edgeinfer_kernels.cuda.decode.step_launches import StepLaunches
from edgeinfer_kernels.cuda.decode.step_norms import NextNorm
from edgeinfer_kernels.cuda.decode.workspace import Activations
from edgeinfer_kernels.cuda.offload.exchange_buffer import ExchangeBuffer
from edgeinfer_kernels.cuda.offload.exchange_kernels import receive_kernel, receive_sum_kernel, send_kernel
from edgeinfer_kernels.sizes.cuda_buffers import LOST_AT
from edgeinfer_kernels.stages import CpuStages


class Host(Protocol):
    """The CPU shard, as `edgeinfer_kernels.cpu.cpu_shard.CpuShard`."""

    def serve(self, tokens: int, start: int) -> None:
        """Run all CPU stages of a step, each as soon as the device has reached it."""
        ...

    def run_stage(self, stage: int, tokens: int, start: int) -> None:
        """Run one stage immediately."""
        ...


class NoHost:
    """The host of a part that begins with hidden states from another GPU, and has no CPU stages."""

    def serve(self, tokens: int, start: int) -> None:
        """The first stage is done: its hidden states are in the exchange buffer."""

    def run_stage(self, stage: int, tokens: int, start: int) -> None:
        """As `serve`."""


class DecodeExchange:
    """Launches the exchange kernels of a decode step at the CPU stages.

    `between`, if set, is called with the stage after the launch of everything before the host's result. It is
    used without CUDA, and if the device cannot wait within a graph.
    """

    def __init__(self, stages: CpuStages, exchange_buffer: ExchangeBuffer) -> None:
        self.stages = stages
        self.exchange_buffer = exchange_buffer
        self.between: Callable[[int], None] | None = None

    def _word(self, at: int) -> Tensor:
        return self.exchange_buffer.words[at:]

    def send(
        self,
        launches: StepLaunches,
        stage: int,
        tokens: int,
        routing: Any = None,
        experts_per_token: int = 0,
        slots: Tensor | None = None,
    ) -> None:
        """Send x to the host, and for an MoE block the selection in `routing`: `experts_per_token` experts
        per token, with their `slots`.
        """
        space, box, width = launches.workspace, self.exchange_buffer, launches.model.spec.hidden_size
        launches.launch(
            send_kernel,
            (1,),
            space.x,
            box.rows,
            self._word(SENT),
            stage,
            routing.ids if experts_per_token else space.state,
            routing.weights if experts_per_token else space.x,
            space.state if slots is None else slots,
            box.ids if experts_per_token else box.words,
            box.weights if experts_per_token else box.rows,
            WIDTH=width,
            STRIDE=box.rows.shape[1],
            TOKENS=tokens,
            EXPERTS_PER_TOKEN=experts_per_token,
            COUNT=0 if slots is None else slots.shape[1],
            warps=8,
        )

    def receive(
        self,
        launches: StepLaunches,
        stage: int,
        y: Tensor | None,
        scale: float,
        norm: NextNorm,
        out: Activations,
        tokens: int,
        post_norm: NextNorm | None = None,
    ) -> None:
        """x = the host's hidden states + scale·y; then its norm into `out`. With a post-norm the host sends
        its part of the sum: x += scale·post_norm(part + y).
        """
        if self.between is not None:
            self.between(stage)
        space, box = launches.workspace, self.exchange_buffer
        launches.launch(
            receive_kernel,
            (tokens,),
            self._word(ANSWERED),
            self._word(LOST),
            stage,
            space.state[LOST_AT:],
            box.rows,
            space.y if y is None else y,
            space.y.stride(0),
            scale,
            space.x,
            launches.norms.args(post_norm),
            launches.norms.args(norm),
            out.words,
            STRIDE=box.rows.shape[1],
            NORM=launches.norms.config(norm, adds=y is not None, has_post_norm=post_norm is not None),
            OUT=out.config,
            warps=8,
        )

    def receive_sum(self, launches: StepLaunches, stage: int, y: Tensor, tokens: int) -> None:
        """y += the host's part of a block's sum."""
        if self.between is not None:
            self.between(stage)
        space, box = launches.workspace, self.exchange_buffer
        launches.launch(
            receive_sum_kernel,
            (tokens,),
            self._word(ANSWERED),
            self._word(LOST),
            stage,
            space.state[LOST_AT:],
            box.rows,
            y,
            y.stride(0),
            WIDTH=launches.model.spec.hidden_size,
            STRIDE=box.rows.shape[1],
            warps=8,
        )


class PrefillExchange:
    """Sends a chunk of a prompt to the host and receives the result, by copies on which the host waits."""

    def __init__(self, stages: CpuStages, exchange_buffer: ExchangeBuffer, device: torch.device) -> None:
        self.stages = stages
        self.host: Host | None = None
        self._exchange_buffer = exchange_buffer
        self._sent = torch.cuda.Event() if device.type == "cuda" else None

    def send(self, x: Tensor, ids: Tensor | None = None, weights: Tensor | None = None) -> None:
        """Send the hidden states, and the selected experts' slots on the host; returns immediately."""
        box, (tokens, width) = self._exchange_buffer, x.shape
        box.rows[:tokens, :width].copy_(x, non_blocking=True)
        if ids is not None and weights is not None:
            box.ids[: len(ids)].copy_(ids, non_blocking=True)
            box.weights[: len(weights)].copy_(weights, non_blocking=True)
        if self._sent is not None:
            self._sent.record()

    def receive(self, stage: int, x: Tensor, start: int) -> None:
        """Wait for the sent data, run the CPU stage, and copy its hidden states back."""
        assert self.host is not None
        if self._sent is not None:
            self._sent.synchronize()
        self.host.run_stage(stage, len(x), start)
        self.fetch(x)

    def fetch(self, x: Tensor) -> None:
        """Copy the hidden states from the exchange buffer."""
        tokens, width = x.shape
        x.copy_(self._exchange_buffer.rows[:tokens, :width], non_blocking=True)


@dataclass(frozen=True)
class PromptStage:
    """One CPU stage of a prefill chunk."""

    exchange: PrefillExchange
    number: int

    def send(self, x: Tensor, ids: Tensor | None = None, weights: Tensor | None = None) -> None:
        """See `PrefillExchange.send`."""
        self.exchange.send(x, ids, weights)

    def receive(self, x: Tensor, start: int) -> None:
        """See `PrefillExchange.receive`."""
        self.exchange.receive(self.number, x, start)
