"""Times a decode step as it is used: recorded as a graph and replayed."""

from typing import Any

import torch
from triton.errors import TritonError

from edgeinfer_kernels.cuda.decode_step import DecodeStep
from edgeinfer_kernels.cuda.step_shapes import Tuning
from edgeinfer_kernels.cuda.tuner import RejectedTrialError
from edgeinfer_kernels.cuda.workspace import CACHED_AT

REPLAYS = 24
ROUNDS = 3
POSITION = 512
"""Tokens in the cache while a step is timed, where it has room for them."""


class _WatchedStep(DecodeStep):
    """Knows the most words that a thread of its kernels spills."""

    spills = 0

    def _launch(
        self, kernel: Any, grid: tuple[int, ...], *arguments: Any, warps: int, **constants: Any
    ) -> Any:
        compiled = super()._launch(kernel, grid, *arguments, warps=warps, **constants)
        self.spills = max(self.spills, compiled.n_spills)
        return compiled


class StepTimer:
    """Seconds of a step of one token with given cuts, on the step's own GPU and buffers.

    What it writes to the caches lies at one position, whose token it leaves unread. The first tuning that it
    is asked for sets how much may be spilled.
    """

    def __init__(self, step: DecodeStep) -> None:
        self._step = step
        self._most_spills: int | None = None

    def __call__(self, tuning: Tuning) -> float:
        """Raises `RejectedTrialError`: it can't be compiled so, or spills more than the first tuning."""
        model, space = self._step.model, self._step.workspace
        step = _WatchedStep(model, space, tuning, dependent=self._step.dependent)
        position = min(POSITION, model.context - 1)
        state = torch.zeros_like(space.state)
        state[8], state[16], state[CACHED_AT] = position, 1, position
        space.state.copy_(state)
        try:
            step.launch(1)
        except TritonError as error:
            raise RejectedTrialError(str(error)) from error
        torch.cuda.synchronize(space.state.device)
        if self._most_spills is None:
            self._most_spills = step.spills
        if step.spills > self._most_spills:
            raise RejectedTrialError(f"{step.spills} words a thread are spilled")
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step.launch(1)
        graph.replay()
        return min(_replays(graph) for _ in range(ROUNDS)) / REPLAYS


def _replays(graph: torch.cuda.CUDAGraph) -> float:
    """Seconds on the device of `REPLAYS` replays."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(REPLAYS):
        graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000
