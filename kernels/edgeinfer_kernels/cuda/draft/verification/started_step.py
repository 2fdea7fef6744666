"""The step of a target that verifies a draft, started before the host has the draft."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from edgeinfer_kernels.sizes.cuda_buffers import MAX_TOKENS

if TYPE_CHECKING:  # it captures drafts too
    from edgeinfer_kernels.cuda.cache.sequences import DeviceSequence
    from edgeinfer_kernels.cuda.decode.captured_steps import CapturedSteps
    from edgeinfer_kernels.cuda.device_parts import SamplingSpace


class StartedVerification:
    """While the step runs, the host reads the draft, and then takes the step instead of running one. A step
    of other tokens, or a change of the cache, discards it.

    The most probable tokens after each of the step's are found with it, if those of the one before were
    needed: from these and the draft the device knows how the text continues (`continuation`).
    """

    def __init__(
        self,
        steps: "CapturedSteps",
        sampling: "SamplingSpace",
        sequence: "DeviceSequence",
        discard_ahead: Callable[[], None],
    ) -> None:
        """`discard_ahead`: discards all steps that were started ahead, this one too."""
        self._steps, self._sequence, self._discard_ahead = steps, sequence, discard_ahead
        self._first, self._count, self._start = 0, 0, 0
        """The token before the draft, the number of draft tokens, and the position of the first."""
        self._started: tuple[tuple[int, ...], int] | None = None
        self._set = 0
        self.best_ids = sampling.results
        """(tokens, 2) int32, on the device: the most probable token after each, -1 if a logit is NaN."""
        cuda = self.words.is_cuda
        self._results = torch.zeros((MAX_TOKENS, 2), dtype=torch.int32, pin_memory=cuda)
        self._found = torch.cuda.Event() if cuda else None
        self._draft: tuple[int, ...] = ()
        """The draft of the last step that was taken."""
        self._best: list[int] | None = None
        """The most probable tokens after those of this step, if they were needed."""
        self._finds_best = False

    @property
    def can_start(self) -> bool:
        """Whether the step needs no other devices, and no tokens on the host."""
        step = self._steps.step
        return step.exchange is None and step.collective is None and not self._steps.per_layer.is_given

    @property
    def words(self) -> Tensor:
        """The words of the step; draft token i is that at 1 + i."""
        return self._steps.step.workspace.state

    @property
    def vocabulary(self) -> int:
        """How many token ids the target has."""
        return self._steps.step.model.vocabulary

    def prepare(self, token_id: int, start: int, count: int, *, are_set: bool = False) -> None:
        """Set the step of the token at `start` and of `count` draft tokens after it, which the device will
        add to the words, unless they `are_set` there.
        """
        self._discard_ahead()
        self._steps.sequence = self._sequence
        self._steps.set_state([token_id, *[0] * count], start, set_tokens=count if are_set else 0)
        self._first, self._start, self._count = token_id, start, count
        self._set, self._finds_best = self._steps.times_set, self._best is not None

    def start(self) -> None:
        """Start the step, after the launches that add its tokens."""
        self._steps.run(1 + self._count)
        if self._finds_best:
            self._find_best()

    def expect(self, ids: Sequence[int]) -> None:
        """The step has these draft tokens."""
        self._started = (self._first, *ids), self._start

    def take(self, ids: Sequence[int], start: int) -> bool:
        """Whether the last step that was started has these tokens; a step is taken once."""
        started, self._started, self._best = self._started, None, None
        if not self._is_last or started != (tuple(ids), start):
            return False
        self._draft = started[0][1:]
        return True

    def best(self) -> list[int]:
        """The most probable tokens after those of the step that was taken; -1 where a logit is NaN."""
        if not self._finds_best:
            self._find_best()
        if self._found is not None:
            self._found.synchronize()
        self._best = [int(token) for token, _ in self._results[: 1 + self._count].tolist()]
        return self._best

    def _find_best(self) -> None:
        tokens = 1 + self._count
        self._steps.find_best(tokens)
        self._results[:tokens].copy_(self.best_ids[:tokens], non_blocking=True)
        if self._found is not None:
            self._found.record()

    def continuation(self) -> list[int] | None:
        """The tokens after the first one of the step that was taken last, if the most probable ones are
        wanted: the right ones of its draft, and the one after them. None: there is none, or another step
        followed it.
        """
        if self._best is None or not self._is_last:
            return None
        right = 0
        while right < len(self._draft) and self._best[right] == self._draft[right]:
            right += 1
        return self._best[: right + 1]

    @property
    def _is_last(self) -> bool:
        """Whether no other step was set since this one."""
        return self._steps.times_set == self._set and self._steps.sequence is self._sequence

    def discard(self) -> None:
        """The cache is about to change."""
        self._started = None
