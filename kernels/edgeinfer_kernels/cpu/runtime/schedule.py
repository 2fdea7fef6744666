"""Schedules: the blocks of a model as lists that the thread pool executes in one run, and their call
arguments.
"""

from collections.abc import Collection, Sequence
from typing import NamedTuple

import numpy as np

from edgeinfer_kernels.blocks.rope import RopeSpec
from edgeinfer_kernels.cpu.layout.packed_matrix import Arena
from edgeinfer_kernels.cpu.runtime.kernel_args import ScheduleStep, StepArgs
from edgeinfer_kernels.cpu.runtime.step_args import RopeTable, fill_step

Run = tuple[int, int, int]
"""Arguments of a thread pool run: a function, its block and its step."""


class StepCall(NamedTuple):
    """A kernel and its structure, and the RoPE whose table it reads."""

    function: int
    block: int
    rope: RopeSpec | None


class StepSchedules:
    """Lists of kernels for `runner`, the kernel `run_schedule`; `layers`: those of each layer.

    `by_token`: functions that need no barrier afterwards in a decode step.
    Kernels with the same RoPE share a call: `calls` are these calls with their RoPE tables. Hidden states are
    at `x`, `stride` bytes apart.
    """

    def __init__(
        self,
        arena: Arena,
        runner: int,
        layers: Sequence[Sequence[StepCall]],
        x: int,
        stride: int,
        by_token: Collection[int],
    ) -> None:
        self._arena, self._runner, self._layers = arena, runner, layers
        self._by_token = by_token
        self.x, self.stride = x, stride
        ropes = dict.fromkeys(step.rope for layer in layers for step in layer)
        made = {rope: (RopeTable(rope), StepArgs()) for rope in ropes}
        self.calls = list(made.values())
        self._call_of = {rope: arena.keep_args(call) for rope, (_, call) in made.items()}
        self._table_of = {rope: table for rope, (table, _) in made.items()}
        self._made = dict[tuple[int, ...], Run]()

    def of_layers(self, layers: Sequence[int]) -> Run:
        """The schedule of some layers; cached."""
        key = tuple(layers)
        if key not in self._made:
            self._made[key] = self._listed(self._steps(layers))
        return self._made[key]

    def whole(self, before: Sequence[tuple[int, int]], head: tuple[int, int], head_call: int) -> Run:
        """The schedule of `before` (called like the first layer), all layers and the head."""
        call = self._call_of[self._layers[0][0].rope]
        first = [(function, block, call) for function, block in before]
        steps = [*first, *self._steps(range(len(self._layers))), (*head, head_call)]
        return self._listed(steps, before_head=True)

    def fill(self, tokens: int, start: int, token_args: int = 0, span: int = 0, x: int = 0) -> None:
        """Fill all calls for the next tokens: at positions start…, or as in the `PositionTable` at
        `token_args`.

        `span`: number of positions from `start` on with RoPE tables; `x`: address of the hidden states, if
        not the default.
        """
        at = x or self.x
        for table, call in self.calls:
            rope = table.address_of(start, max(span, tokens))
            fill_step(call, at, self.stride, tokens, start, rope, token_args)

    def table_of(self, rope: RopeSpec | None) -> RopeTable:
        """The table of a RoPE."""
        return self._table_of[rope]

    def _steps(self, layers: Sequence[int]) -> list[tuple[int, int, int]]:
        """(function, block, call) for each block of these layers."""
        return [
            (step.function, step.block, self._call_of[step.rope])
            for layer in layers
            for step in self._layers[layer]
        ]

    def _listed(self, steps: Sequence[tuple[int, int, int]], before_head: bool = False) -> Run:
        listed = [(*step, int(step[0] not in self._by_token)) for step in steps]
        if before_head:  # It may be called for one of the rows only.
            listed[-2] = (*steps[-2], 1)
        schedule = self._arena.fill_all(ScheduleStep, [ScheduleStep(*step) for step in listed])
        return self._runner, schedule, self._arena.keep(np.array([len(steps)], np.int64))
