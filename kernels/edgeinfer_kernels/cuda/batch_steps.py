"""Steps of several sequences; one of a token each may start before the host knows the tokens."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from edgeinfer_kernels.backend import PAGE, BatchPositions
from edgeinfer_kernels.cuda.cache.layout import BATCH, independent_tokens, is_one_step
from edgeinfer_kernels.cuda.decode.captured_steps import CapturedSteps
from edgeinfer_kernels.cuda.decode.device_logits import DeviceLogits
from edgeinfer_kernels.cuda.decode.sampling import argmax, sample
from edgeinfer_kernels.cuda.device_parts import SamplingSpace, synchronize
from edgeinfer_kernels.sizes.cuda_buffers import MAX_TOKENS, RECENT, REQUEST_SIZE


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
        self, steps: CapturedSteps, sampling: SamplingSpace, logits: DeviceLogits, of_sequence: int
    ) -> None:
        self._steps, self._space, self._logits = steps, sampling, logits
        self._of_sequence = of_sequence
        """Maximum number of tokens of a sequence in a step."""
        cuda = steps.step.workspace.state.is_cuda
        self._requests = torch.zeros((MAX_TOKENS, REQUEST_SIZE), dtype=torch.float64, pin_memory=cuda)
        self._recent = torch.zeros((MAX_TOKENS, RECENT), dtype=torch.int32, pin_memory=cuda)
        self._results = torch.zeros((MAX_TOKENS, 2), dtype=torch.int32, pin_memory=cuda)
        self._found = self._results.numpy()[:, 0]
        """The ids of the results."""
        self._sampled = torch.cuda.Event() if cuda else None
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
        self._launch_sampling(requests, recent)
        may_follow = self.before is None and self._steps.per_layer.may_follow
        runs_ahead = following is not None and may_follow
        if following is not None and runs_ahead:
            self._start_ahead(following)
        sampled: list[int] = [0] * len(requests)
        try:
            if self._sampled is not None:
                self._sampled.synchronize()
            sampled = self._found[: len(requests)].tolist()
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

    def results(self, count: int) -> list[int]:
        """The ids that the last step has sampled after its first tokens; -1 where a logit is NaN."""
        self._results[:count].copy_(self._space.results[:count], non_blocking=True)
        synchronize(self._steps.step.workspace.state.device)
        found: list[int] = self._found[:count].tolist()
        return found

    def _launch_sampling(self, requests: Sequence[Sequence[float]], recent: Sequence[Sequence[int]]) -> None:
        space, count = self._space, len(requests)
        logits = self._steps.step.workspace.logits[:count]
        if all(request[0] == 0 for request in requests) and not any(recent):
            argmax(logits, space.buffers, space.sampled, space.results)
        else:
            self._send_requests(requests, recent)
            sample(logits, space.requests, space.recent, space.buffers, space.sampled, space.results)
        self._results[:count].copy_(space.results[:count], non_blocking=True)
        self._steps.per_layer.report()
        if self._sampled is not None:
            self._sampled.record()

    def _send_requests(self, requests: Sequence[Sequence[float]], recent: Sequence[Sequence[int]]) -> None:
        space, count = self._space, len(requests)
        self._requests.numpy()[:count] = requests
        space.requests[:count].copy_(self._requests[:count], non_blocking=True)
        if not any(recent):
            return
        rows = self._recent.numpy()
        for row, ids in enumerate(recent):
            rows[row, : len(ids)] = ids
        # From pinned memory: another copy would wait for the step that is running.
        space.recent[:count].copy_(self._recent[:count], non_blocking=True)

    def _start_ahead(self, following: BatchPositions) -> None:
        """Start the step of the sampled tokens, which only the device knows."""
        count = len(following.positions)
        self._steps.set_batch([0] * count, following)
        self._steps.per_layer.expect()
        self._steps.step.workspace.state[:count] = self._space.results[:count, 0].clamp(min=0)
        self._steps.run(count, layout=BATCH)
