"""Steps of several sequences; one of a token each may start before the host knows the tokens."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from edgeinfer_kernels.backend import PAGE, BatchPositions
from edgeinfer_kernels.cuda.cache.layout import BATCH, independent_tokens, is_one_step
from edgeinfer_kernels.cuda.decode.captured_steps import CapturedSteps
from edgeinfer_kernels.cuda.decode.device_logits import DeviceLogits
from edgeinfer_kernels.cuda.device_parts import synchronize
from edgeinfer_kernels.cuda.found_tokens import FoundTokens


class _Batch(NamedTuple):
    """The tokens of a step."""

    ids: tuple[int, ...]
    positions: BatchPositions
    sequences: tuple[int, ...] = ()
    """The numbers of their sequences, if these have separate states."""

    def equals(self, other: "_Batch") -> bool:
        """Whether it has the same tokens at the same places."""
        own, others = self.positions, other.positions
        same = (self.ids, self.sequences) == (other.ids, other.sequences)
        if not same or not np.array_equal(own.positions, others.positions):
            return False
        pages = int(own.positions.max()) // PAGE + 1
        return np.array_equal(own.pages[:, :pages], others.pages[:, :pages])


class BatchSteps:
    """Runs steps of several sequences and samples their next tokens."""

    def __init__(
        self, steps: CapturedSteps, found: FoundTokens, logits: DeviceLogits, of_sequence: int
    ) -> None:
        self._steps, self._found, self._logits = steps, found, logits
        self._of_sequence = of_sequence
        """Maximum number of tokens of a sequence in a step."""
        self._last: _Batch | None = None
        self._ahead: _Batch | None = None
        """The step that was started with the tokens sampled after the last one."""

        self.before: Callable[[Sequence[int], BatchPositions], None] | None = None
        """Called before each step: the CPU shard of a split model takes its tokens."""

    def discard_ahead(self) -> None:
        """Discard the step that was started ahead, because it is not the requested one."""
        if self._ahead is not None:
            self._ahead = None
            synchronize(self._steps.step.workspace.state.device)  # it reads the host's buffers

    def forward(self, ids: Sequence[int], positions: BatchPositions, sequences: Sequence[int] = ()) -> None:
        """Process the tokens. `sequences`: as for `CapturedSteps.set_batch`; then each has one token."""
        self._last = batch = _Batch(tuple(ids), positions, tuple(sequences))
        if self._ahead is not None and self._ahead.equals(batch):
            self._ahead = None
            return
        self.discard_ahead()
        if sequences:
            self._run(*batch)
            return
        if self._of_sequence >= len(ids) and is_one_step(positions):
            self._run(*batch)
            return
        steps = independent_tokens(positions)
        for rows in steps:
            self._run(
                [ids[row] for row in rows], BatchPositions(positions.positions[rows], positions.pages[rows])
            )
            if len(steps) > 1:
                self._logits.collect(rows, len(ids))

    def _run(self, ids: Sequence[int], positions: BatchPositions, sequences: Sequence[int] = ()) -> None:
        if self.before is not None:
            self.before(ids, positions)
        self._steps.set_batch(ids, positions, sequences)
        self._steps.per_layer.send(ids)
        self._steps.run(len(ids), layout=BATCH)
        if self.before is not None:
            synchronize(self._steps.step.workspace.state.device)

    def sample(
        self,
        requests: Sequence[Sequence[float]],
        recent: Sequence[Sequence[int]],
        following: BatchPositions | None,
    ) -> list[int]:
        """As `Backend.sample_batch`, after `forward`."""
        if self._logits.are_collected:
            return [-1] * len(requests)
        self._found.launch_sampled(requests, recent)
        may_follow = self.before is None and self._steps.per_layer.may_follow
        runs_ahead = following is not None and may_follow
        if following is not None and runs_ahead:
            self._start_ahead(following)
        sampled: list[int] = [0] * len(requests)
        try:
            sampled = self._found.read(len(requests))
        finally:  # The started step waits for its rows, even if it's interrupted.
            if following is not None and runs_ahead:
                self._steps.per_layer.give([max(token, 0) for token in sampled])
        if self._steps.per_layer.were_late():
            assert self._last is not None
            self.discard_ahead()
            self._run(*self._last)
            return self.sample(requests, recent, None)
        if following is not None and runs_ahead:
            self._ahead = _Batch(tuple(sampled), following)
            if min(sampled) < 0:  # the host needs the logits, which the next step has overwritten
                assert self._last is not None
                self.discard_ahead()
                self._run(*self._last)
        return sampled

    def _start_ahead(self, following: BatchPositions) -> None:
        """Start the step of the sampled tokens, which only the device knows."""
        count = len(following.positions)
        self._steps.set_batch([0] * count, following)
        self._steps.per_layer.expect()
        self._steps.step.workspace.state[:count] = self._found.on_device[:count, 0].clamp(min=0)
        self._steps.run(count, layout=BATCH)
