"""The step of a target that verifies a draft, started before the host has the draft."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import Tensor

from edgeinfer_kernels.draft_loop import VerifyingStep

if TYPE_CHECKING:  # it captures drafts too
    from edgeinfer_kernels.cuda.cache.sequences import DeviceSequence
    from edgeinfer_kernels.cuda.decode.captured_steps import CapturedSteps
    from edgeinfer_kernels.cuda.found_tokens import FoundTokens

Requests = Sequence[Sequence[float]]
"""Sampling requests for the tokens after each of a step's; empty: the most probable ones."""


class StartedVerification:
    """While the step runs, the host reads the draft, and then takes the step instead of running one. A step
    of other tokens, or a change of the cache, discards it.

    The tokens after each of the step's are found with it, if those of the one before were found here: from
    these and the draft the device knows how the text continues (`continuation`).
    """

    def __init__(
        self,
        steps: "CapturedSteps",
        found: "FoundTokens",
        sequence: "DeviceSequence",
        discard_ahead: Callable[[], None],
    ) -> None:
        """`discard_ahead`: discards all steps that were started ahead, this one too."""
        self._steps, self._sequence, self._discard_ahead = steps, sequence, discard_ahead
        self._step, self._count = VerifyingStep(0, 0), 0
        """The step that was started last, and the number of its draft tokens."""
        self._started: tuple[int, ...] | None = None
        """Its tokens."""
        self._set = 0
        self.found = found
        self._requests: Requests | None = None
        """How the tokens after those of the step were found; None: they weren't."""
        self._draft: tuple[int, ...] = ()
        """The draft of the last step that was taken."""
        self._following: list[int] | None = None
        """The tokens after those of this step, if they were found here."""
        self.is_known_ahead = False
        """Whether these were found with the step, as the device has used them since."""

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

    def prepare(self, step: VerifyingStep, count: int, *, are_set: bool = False) -> None:
        """Set the step and `count` draft tokens after its token, which the device will add to the words,
        unless they `are_set` there.
        """
        self._discard_ahead()
        self._steps.sequence = self._sequence
        self._steps.set_state([step.token, *[0] * count], step.start, set_tokens=count if are_set else 0)
        self._step, self._count, self._set = step, count, self._steps.times_set

    def start(self) -> None:
        """Start the step, after the launches that add its tokens."""
        self._steps.run(1 + self._count)
        self._requests = None
        if self._following is not None:
            self._find(self._step.requests[: 1 + self._count])

    def expect(self, ids: Sequence[int]) -> None:
        """The host takes these draft tokens. The step is of no use if it has others after them."""
        self._started = (self._step.token, *ids) if len(ids) == self._count else None

    def take(self, ids: Sequence[int], start: int) -> bool:
        """Whether the last step that was started has these tokens; a step is taken once."""
        started, self._started, self._following = self._started, None, None
        if not self._is_last or (started, self._step.start) != (tuple(ids), start):
            return False
        self._draft = tuple(ids)[1:]
        return True

    def tokens(self, requests: Requests = ()) -> list[int]:
        """The tokens after those of the step that was taken; -1 where the device can't find one."""
        self.is_known_ahead = self._requests is not None and list(self._requests) == list(requests)
        if not self.is_known_ahead:
            self._find(requests)
        self._following = self.found.read(1 + self._count)
        return self._following

    def _find(self, requests: Requests) -> None:
        self._requests = requests
        if requests:
            self.found.launch_sampled(requests, [()] * len(requests))
        else:
            self.found.launch_best(1 + self._count)

    def continuation(self) -> list[int] | None:
        """The tokens after the first one of the step that was taken last: the right ones of its draft, and
        the one after them. None: they weren't found here, or another step followed it.
        """
        if self._following is None or not self._is_last:
            return None
        right = 0
        while right < len(self._draft) and self._following[right] == self._draft[right]:
            right += 1
        return self._following[: right + 1]

    @property
    def is_taken(self) -> bool:
        """Whether the last step is one that was taken."""
        return self._started is None and self._is_last

    @property
    def _is_last(self) -> bool:
        """Whether no other step was set since this one."""
        return self._steps.times_set == self._set and self._steps.sequence is self._sequence

    def discard(self) -> None:
        """The cache is about to change."""
        self._started = None
