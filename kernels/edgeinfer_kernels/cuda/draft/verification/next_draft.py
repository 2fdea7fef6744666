"""A draft that is made ahead: its launches follow the step that verifies the draft before it, while the host
doesn't know yet which tokens are right. The device knows, as it finds the tokens that follow.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from edgeinfer_kernels.cuda.draft.verification.next_draft_kernels import next_tokens_kernel
from edgeinfer_kernels.sizes.cuda_buffers import MAX_TOKENS

if TYPE_CHECKING:
    from edgeinfer_kernels.cuda.decode.captured_steps import CapturedSteps
    from edgeinfer_kernels.cuda.draft.captured_launches import CapturedLaunches
    from edgeinfer_kernels.cuda.draft.verification.started_step import StartedVerification


class NextTokens:
    """Sets the first step of a head's next draft on the device: it processes the tokens that the target
    continues with, and before them those that it has processed last, so that every step has as many tokens
    and ends with the last one. Processing a token again writes the same keys and values.
    """

    def __init__(
        self,
        steps: "CapturedSteps",
        verification: "StartedVerification",
        captured: "CapturedLaunches",
        wait: Callable[[], None],
    ) -> None:
        """`wait`: for the last draft."""
        self._steps, self._verification, self._captured = steps, verification, captured
        self._wait = wait
        self._recent: list[int] = []
        """The last tokens that the head has processed."""
        self._end = 0
        """The position after them."""
        self._made: tuple[int, int, int] | None = None
        """Of a draft that was made ahead: the position of its first token, the row of the target's states
        that belongs to position 0, and the number of draft tokens."""
        self._widths: dict[int, int] = {}
        """The number of tokens of the prepared first steps, by that of draft tokens."""

    def prepare(self, longest: int, widths: Sequence[int]) -> None:
        """Capture what sets the first steps after drafts of up to `longest` tokens; first steps of `widths`
        tokens are captured already.
        """
        for count in range(1, min(longest + 1, max(widths))):
            width = self._steps.width(1 + count)
            if width in widths:
                self._widths[count] = width
                self._captured.prepare(("next", count, width), partial(self.launch, count, width))

    def follows(self, ids: Sequence[int]) -> bool:
        """Whether the head is to process what the target has continued with: a draft after that one may be
        made ahead.
        """
        return list(ids) == self._verification.continuation()

    def take(self, ids: Sequence[int], start: int, *, follows: bool) -> int:
        """The number of draft tokens that were made ahead after these tokens of the head's text; 0: none
        were. `follows`: as the method.
        """
        is_next = start == self._end
        self._recent = [*self._recent, *ids][-MAX_TOKENS:] if is_next else list(ids)[-MAX_TOKENS:]
        self._end = start + len(ids)
        made, count = (start, self._steps.sequence.states_at), 0
        is_known = follows and self._verification.is_known_ahead
        if is_known and self._made is not None and self._made[:2] == made:
            count, self._made = self._made[2], None
        self.discard()
        return count

    def set_first(self, count: int) -> int:
        """Set the first step after the target's step with `count` draft tokens, both of which were launched;
        the number of its tokens. 0: it can't be set there.
        """
        steps, width = self._steps, self._widths.get(count, 0)
        before, last = width - 1, self._end + 2 * (1 + count)
        is_text = steps.sequence.slots is None and steps.recent is None
        if not width or not is_text or not before <= min(len(self._recent), self._end):
            return 0
        if last > steps.step.model.context:
            return 0
        steps.set_state([*self._recent[len(self._recent) - before :], 0], self._end - before)
        self._captured.run(("next", count, width), partial(self.launch, count, width))
        self._made = self._end, steps.sequence.states_at, count
        return width

    def discard(self) -> None:
        """The head is about to process other tokens: a draft that isn't taken reads what the host sets."""
        if self._made is not None:
            self._made = None
            self._wait()

    def launch(self, count: int, width: int) -> None:
        """Launch what sets a first step of `width` tokens after `count` draft tokens."""
        next_tokens_kernel[(1,)](
            self._steps.step.workspace.state,
            self._verification.words,
            self._verification.found.on_device,
            count,
            width - 1,
            num_warps=1,
        )
