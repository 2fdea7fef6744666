"""The draft loop of a head on a GPU: its first step, then steps of one token, without the host in between.

The first step processes the tokens that the head hasn't, with the target's states; the others the draft token
before them, with the head's own state. Each kind of first step and each number of further ones is a graph, so
a whole draft takes two launches. The host reads the tokens and their probabilities when all are made; the
step of the target that verifies them may have begun then, and the next draft follows that step.

Of several heads each drafts one token: all process the first step, and a further one is that of the next
head, with all tokens drafted so far.

Of a tree the host reads the candidates after each level. A step of a tree has all of its tokens so far: those
of the levels before it aren't cached positions, as a token attends only to those on its path.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch

from edgeinfer_kernels.cuda.decode.captured_steps import CapturedSteps
from edgeinfer_kernels.cuda.device_parts import SamplingSpace, synchronize
from edgeinfer_kernels.cuda.draft.candidate_steps import CandidateSteps
from edgeinfer_kernels.cuda.draft.captured_launches import CapturedLaunches
from edgeinfer_kernels.cuda.draft.states.keeping import keep_own
from edgeinfer_kernels.cuda.draft.states.own_states import OwnStates
from edgeinfer_kernels.cuda.draft.states.state_kernels import BY_ROW, LAST
from edgeinfer_kernels.cuda.draft.token_kernels import draft_slices_kernel, draft_token_kernel
from edgeinfer_kernels.cuda.draft.verification.next_draft import NextTokens
from edgeinfer_kernels.cuda.draft.verification.started_step import StartedVerification
from edgeinfer_kernels.cuda.tuning.step_shapes import next_power_of_two
from edgeinfer_kernels.draft_loop import DraftedTokens, DraftRequest

MAX_DRAFTED = 16
"""Maximum tokens of a draft."""
PREPARED = 7
"""Maximum tokens of a draft whose steps are captured when the head is loaded."""


class DraftSteps:
    """Drafts with the `steps` of a head; without CUDA its kernels are launched one by one."""

    def __init__(
        self,
        steps: CapturedSteps,
        sampling: SamplingSpace,
        verification: StartedVerification | None = None,
    ) -> None:
        self._steps, self._sampling = steps, sampling
        self._verification = verification
        self._others: tuple[DraftSteps, ...] = ()
        self._device = steps.step.workspace.state.device
        self.captured = CapturedLaunches(self._device)
        cuda = self._device.type == "cuda"
        self._ids = torch.zeros(MAX_DRAFTED, dtype=torch.int32, pin_memory=cuda)
        self._probs = torch.zeros(MAX_DRAFTED, dtype=torch.float32, pin_memory=cuda)
        self._made = torch.cuda.Event() if cuda else None
        self._candidates = CandidateSteps(steps.step.launches, sampling)
        self._next: NextTokens | None = None
        if verification is not None and not self._space.stays:
            self._next = NextTokens(steps, verification, self.captured, self._wait)

    def draft(self, ids: Sequence[int], start: int, request: DraftRequest) -> DraftedTokens:
        """As `Backend.draft`: the most probable tokens, also if the request samples. All are made, then those
        with too low a probability are dropped, unless the step that verifies them is started. A draft that
        was made ahead may be shorter than requested.
        """
        verification = None if request.step is None else self._verification
        follows = verification is not None and self._next is not None and self._next.follows(ids)
        made = 0 if self._next is None else self._next.take(ids, start, follows=follows)
        count = min(len(request.min_probs), made or self._most)
        if request.step is not None and verification is not None:
            verification.prepare(request.step, count, are_set=made > 0)
        if not made:
            self._launch(ids, start, count)
        if verification is None:
            synchronize(self._device)
        else:
            verification.start()
            self._wait()
        drafted = zip(self._ids[:count].tolist(), self._probs[:count].tolist(), strict=True)
        if follows:
            self._launch_next(count)
        kept, probs, reached = list[int](), list[float](), 1.0
        limit = request.id_limit if self._steps.step.model.output_ids is None else 1 << 31
        for index, (token, prob) in enumerate(drafted):
            reached *= prob
            is_likely = verification is not None or reached >= request.min_probs[index]
            if not is_likely or math.isnan(prob) or not 0 <= token < limit:
                break
            kept.append(token)
            probs.append(prob)
        if verification is not None:
            verification.expect(kept)
        return DraftedTokens(kept, probs, len(ids) + count - 1, made=count)

    def _launch(self, ids: Sequence[int], start: int, count: int) -> None:
        """Launch a draft of `count` tokens."""
        for each in (self, *self._others):
            each._steps.set_state(ids, start)
        width = self._steps.width(len(ids))
        is_padded = width > len(ids)
        self._run(("padded" if is_padded else "first", width), partial(self.launch_first, width, is_padded))
        self._launch_others(count)

    def _launch_next(self, count: int) -> None:
        """Launch the draft after this one, of as many tokens; it is made after the step that was started."""
        width = 0 if self._next is None else self._next.set_first(count)
        if width:
            self._run(("first", width), partial(self.launch_first, width))
            self._launch_others(count)

    def _launch_others(self, count: int) -> None:
        """Launch the steps of the draft tokens after the first."""
        if count > 1:
            self._run(("further", count - 1), partial(self.launch_further, count - 1))
        if self._made is not None:
            self._made.record()

    def _wait(self) -> None:
        """Wait for the last draft."""
        if self._made is not None:
            self._made.synchronize()

    def discard_ahead(self) -> None:
        """Discard a draft that was made ahead: the head is about to process other tokens."""
        if self._next is not None:
            self._next.discard()

    def level(
        self, ids: Sequence[int], start: int, parents: Sequence[int], count: int, power: float
    ) -> list[list[tuple[int, float]]]:
        """As `Backend.draft_level`."""
        self.discard_ahead()
        self._steps.power = power
        self._steps.set_state(ids, start, parents)
        width = self._steps.width(len(ids))
        is_padded, rows = width > len(ids), len(parents) or 1
        if parents:
            self._run(("level", width), partial(self.launch_level, width))
        else:
            kind = "root, padded" if is_padded else "root"
            self._run((kind, width), partial(self.launch_root, width, is_padded))
        synchronize(self._device)
        return self._candidates.found(rows, count)

    def lead(self, others: Sequence["DraftSteps"]) -> None:
        """Draft with these further heads, each for one more token. They read the states that the heads before
        them had.
        """
        self._others, self._next = tuple(others), None
        for other in others:
            other._space.own = self._space.own

    @property
    def _most(self) -> int:
        """Maximum tokens of a draft."""
        return min(MAX_DRAFTED, 1 + len(self._others)) if self._others else MAX_DRAFTED

    def warm_up(self, widths: Sequence[int], padded: int = 0) -> None:
        """Capture the first steps of these numbers of tokens, those that may be `padded` to a number, and all
        numbers of usual further steps.
        """
        for each in (self, *self._others):
            each._steps.set_state([0], 0)
        for width in widths:
            self._prepare(("first", width), partial(self.launch_first, width))
        if padded:
            self._prepare(("padded", padded), partial(self.launch_first, padded, True))
        for count in range(1, min(PREPARED, self._most)):
            self._prepare(("further", count), partial(self.launch_further, count))
        if self._next is not None:
            self._next.prepare(PREPARED, widths)
        synchronize(self._device)

    def warm_up_trees(self, widths: Sequence[int], padded: int) -> None:
        """As `warm_up`, of trees, whose levels have any of these numbers of tokens, `padded` included."""
        self._steps.set_state([0], 0)
        for width in widths:
            self._prepare(("root", width), partial(self.launch_root, width))
        self._prepare(("root, padded", padded), partial(self.launch_root, padded, True))
        for width in (*widths, padded):
            self._steps.set_state([0] * width, 0, range(-1, width - 1))
            self._prepare(("level", width), partial(self.launch_level, width))
        synchronize(self._device)

    def _run(self, kind: tuple[str, int], launch: Callable[[], None]) -> None:
        self.captured.run(kind, launch, self._changed)

    def _prepare(self, kind: tuple[str, int], launch: Callable[[], None]) -> None:
        self.captured.prepare(kind, launch, self._changed)

    def _changed(self) -> list[torch.Tensor]:
        """What a launch before a capture changes besides positions after the text."""
        return [*(each._steps.step.workspace.state for each in (self, *self._others)), self._space.own]

    @property
    def _space(self) -> OwnStates:
        """The buffers of the head's input."""
        spaces = self._steps.step.workspace.spaces.values()
        return next(space for space in spaces if isinstance(space, OwnStates))

    def _keep_last(self, row: int = 0) -> None:
        """Keep the state of a step's last token, which later steps read in this row."""
        space = self._space
        keep_own(self._steps.step.launches, space.own[row : row + 1], 1, LAST.value, raw=space.raw)

    def launch_first(self, tokens: int, is_padded: bool = False) -> None:
        """Launch the kernels of a first step of this many tokens, and of the first draft token, which needs
        the logits of the last one: if the step `is_padded`, that is known on the device.
        """
        for other in self._others:
            other._steps.step.launch(tokens, first_logits=tokens)
        self._steps.step.launch(tokens, first_logits=0 if is_padded else tokens - 1)
        self._select(0)

    def launch_further(self, count: int) -> None:
        """Launch the kernels of this many further steps."""
        for index in range(1, count + 1):
            tokens = index if self._others else 1
            self._head(index)._launch_own(tokens, tokens - 1)
            self._select(index)

    def _launch_own(self, tokens: int, first_logits: int = 0) -> None:
        """Launch a step whose tokens read the head's own states."""
        self._space.reads_own = True
        try:
            self._steps.step.launch(tokens, first_logits=first_logits)
        finally:
            self._space.reads_own = False

    def _head(self, index: int) -> "DraftSteps":
        """The head of a draft token; of the token after the last one, the last head."""
        heads = (self, *self._others)
        return heads[min(index, len(self._others))]

    def launch_root(self, tokens: int, is_padded: bool = False) -> None:
        """As `launch_first`, with the candidates after the last token."""
        self._steps.step.launch(tokens, first_logits=0 if is_padded else tokens - 1)
        self._keep_last()
        self._candidates.launch(1, last=True)

    def launch_level(self, tokens: int) -> None:
        """Launch the kernels of a step of a tree, and of the candidates after each of its tokens."""
        self._launch_own(tokens)
        space = self._space
        keep_own(self._steps.step.launches, space.own, tokens, BY_ROW.value, raw=space.raw)
        self._candidates.launch(tokens)

    def _select(self, index: int) -> None:
        """Keep the state of the step's last token, and make the draft token after it the next step's: of
        several heads that of the next one, with the tokens before it.
        """
        head, following, repeated = self._head(index), self._head(index + 1), index if self._others else 0
        launches = head._steps.step.launches
        space, buffers = launches.workspace, head._sampling.buffers
        vocabulary, slices = launches.model.spec.vocabulary_size, buffers.keys.shape[1]
        head._keep_last(repeated)
        verification = self._verification
        launches.launch(
            draft_slices_kernel,
            (slices,),
            space.logits,
            space.state,
            buffers.keys,
            buffers.masses,
            vocabulary,
            SLICE=buffers.slice,
            warps=4,
        )
        launches.launch(
            draft_token_kernel,
            (1,),
            buffers.keys,
            buffers.masses,
            space.state,
            following._steps.step.workspace.state,
            None if verification is None else verification.words,
            launches.model.output_ids,
            self._ids,
            self._probs,
            index,
            repeated,
            repeated or int(self._space.stays),
            vocabulary,
            0 if verification is None else verification.vocabulary,
            slices,
            SLICES=next_power_of_two(slices),
            warps=4,
        )
