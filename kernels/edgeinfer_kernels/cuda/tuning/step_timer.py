"""Times a decode step as in normal use: captured as a graph and replayed."""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from triton.errors import TritonError

from edgeinfer_kernels.cuda.current_device import capturing
from edgeinfer_kernels.cuda.decode.decode_step import DecodeStep
from edgeinfer_kernels.cuda.decode.step_launches import StepLaunches
from edgeinfer_kernels.cuda.tensor.collective import Alone
from edgeinfer_kernels.cuda.tuning.step_compiling import compile_tunings
from edgeinfer_kernels.cuda.tuning.step_shapes import Tuning
from edgeinfer_kernels.cuda.tuning.tuner import RejectedCandidateError, tune
from edgeinfer_kernels.sizes.cuda_buffers import CACHED_AT, MASKS_AT, POSITIONS_AT, SEQUENCES_AT

REPLAYS = 24
ROUNDS = 3
SHALLOW, DEEP = 512, 8192
"""Cached tokens while a step is timed, if the context allows: at most half of the context."""


class _WatchedLaunches(StepLaunches):
    """Launches that record the maximum register spill per thread of their kernels, in words."""

    spills = 0

    def run(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **keywords: Any) -> Any:
        compiled = super().run(kernel, grid, *arguments, **keywords)
        self.spills = max(self.spills, compiled.n_spills)
        return compiled


class StepTimer:
    """Seconds of a step with given tile configs, on the step's GPU and buffers: the mean of a step with a
    short cache and one with a long cache, as far as the context allows.

    It writes to cache positions after those that are read. The first tuning for a token count sets the
    allowed register spill.
    """

    def __init__(self, step: DecodeStep) -> None:
        self._step = step
        self._max_spills: dict[int, int] = {}

    def __call__(self, tuning: Tuning, tokens: int) -> float:
        """Raises `RejectedCandidateError`: it cannot be compiled with these tile configs, or spills more than
        the first tuning.
        """
        model, space = self._step.model, self._step.workspace
        usual = self._step.launches
        launches = _WatchedLaunches(model, space, tuning, dependent=usual.dependent)
        step = DecodeStep(launches, collective=self._step.collective and Alone())
        self._set_position(min(SHALLOW, model.context - tokens), tokens)
        try:
            step.launch(tokens)
        except TritonError as error:
            raise RejectedCandidateError(str(error)) from error
        torch.cuda.synchronize(space.state.device)
        if launches.spills > self._max_spills.setdefault(tokens, launches.spills):
            raise RejectedCandidateError(f"{launches.spills} words a thread are spilled")
        graph = torch.cuda.CUDAGraph()
        with capturing(space.state.device, graph):
            step.launch(tokens)
        graph.replay()
        durations = []
        for position in (min(SHALLOW, model.context - tokens), min(DEEP, model.context // 2 - tokens)):
            self._set_position(position, tokens)
            durations.append(min(replay_seconds(graph, REPLAYS) for _ in range(ROUNDS)))
        return sum(durations) / len(durations)

    def compile(self, tunings: Sequence[Tuning], tokens: int) -> None:
        """As `TimeStep.compile`."""
        compile_tunings(self._step, tunings, tokens)

    def _set_position(self, position: int, tokens: int) -> None:
        """Place the step's tokens after `position` cached tokens."""
        space, position = self._step.workspace, max(position, 0)
        state = torch.zeros_like(space.state)
        for token in range(tokens):
            state[POSITIONS_AT + token], state[MASKS_AT + token] = position + token, (2 << token) - 1
        state[CACHED_AT] = state[SEQUENCES_AT] = position
        space.state.copy_(state)


def replay_seconds(graph: torch.cuda.CUDAGraph, replays: int) -> float:
    """Seconds of a replay on the device: the mean of some, one after another."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000 / replays


def fast_widths(seconds: Mapping[int, float]) -> tuple[int, ...]:
    """Those token counts of steps, rising, that take less time than each larger one."""
    kept = list[int]()
    for width in sorted(seconds, reverse=True):
        if not kept or seconds[width] < seconds[kept[-1]]:
            kept.append(width)
    return tuple(reversed(kept))


def measured_tuning(step: DecodeStep, seconds: float) -> Tuning | None:
    """The fastest tile configs of a step's kernels that are found in this time; None: not even the default
    ones can be timed here.
    """
    try:
        return tune(StepTimer(step), step.tuning, seconds).tuning
    except RejectedCandidateError:
        return None
