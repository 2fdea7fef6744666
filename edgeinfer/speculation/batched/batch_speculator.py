"""Speculative decoding of several texts: each has a draft, and one forward verifies all of them.

The drafts share the rows of a step, so they are shorter the more texts there are, and end where further rows
aren't predicted to pay.
"""

import time
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from edgeinfer.generation.loop import DraftCount, SampledToken
from edgeinfer.sampling import Sampler
from edgeinfer.speculation.draft_costs import MAX_ROWS
from edgeinfer.speculation.drafter import Draft, DraftRequest, DraftText
from edgeinfer.speculation.speculator import Speculator
from edgeinfer.speculation.verification import path_of, verify

OWN_SHARE = 0.3
"""Weight of a text's last draft in the acceptance of its next one."""


@dataclass(frozen=True)
class BatchedText:
    """A text that gets one token or more in the next step. `limit`: maximum draft tokens; 0: no draft."""

    key: Hashable
    history: Sequence[int]
    sampler: Sampler
    limit: int
    count: DraftCount


@dataclass
class _Step:
    """A step in progress whose time is recorded."""

    texts: int
    begin: float
    drafted: int = 0
    """Tokens of the longest draft that was requested; 0: none was."""
    draft_seconds: float = 0.0


@dataclass
class BatchSpeculator:
    """The drafts of texts that are decoded together."""

    speculator: Speculator
    _acceptance: dict[Hashable, float] = field(default_factory=dict)
    """That of each text, given the tokens before."""
    _step: _Step | None = None

    @property
    def may_draft(self) -> bool:
        """Whether the next step is likely to have drafts, so that nothing should start ahead of it."""
        controller = self.speculator.batched
        return not controller.cooldown_tokens and not controller.costs.baselines_due

    def draft(self, texts: Sequence[BatchedText], rows: int) -> list[Draft]:
        """A draft for each text of a step of at most `rows` tokens, which begins now."""
        controller, rows = self.speculator.batched, min(rows, MAX_ROWS)
        self._step = None
        if controller.cooldown_tokens:
            controller.cooldown_tokens -= 1
            return [Draft()] * len(texts)
        if len(texts) >= rows:
            return [Draft()] * len(texts)
        self._step = step = _Step(len(texts), time.perf_counter())
        acceptances = [self._acceptance.get(text.key, controller.acceptance) for text in texts]
        lengths = controller.lengths([text.limit for text in texts], acceptances, rows)
        step.drafted = max(lengths)
        if not step.drafted:
            return [Draft()] * len(texts)
        thresholds = controller.min_probs(step.drafted, len(texts))
        wanted = [
            DraftText(text.key, text.history, DraftRequest(length, text.sampler.settings, *thresholds))
            for text, length in zip(texts, lengths, strict=True)
        ]
        return self._propose([each for each in wanted if each.request.max_tokens], texts, step)

    def _propose(self, wanted: list[DraftText], texts: Sequence[BatchedText], step: _Step) -> list[Draft]:
        """The drafts of those texts that the drafter is prepared for. What it reads of a new text serves all
        later drafts, so that time isn't counted.
        """
        ready = self.speculator.drafter.prepare_each(wanted)
        wanted = [text for text, is_ready in zip(wanted, ready, strict=True) if is_ready]
        step.drafted = max((text.request.max_tokens for text in wanted), default=0)
        step.begin = begin = time.perf_counter()
        made = self.speculator.propose_each(wanted)
        step.draft_seconds = time.perf_counter() - begin
        drafts = {text.key: draft for text, draft in zip(wanted, made, strict=True)}
        return [drafts.get(text.key, Draft()) for text in texts]

    def verify(
        self,
        text: BatchedText,
        draft: Draft,
        logits: npt.NDArray[np.float32] | None,
        best: Sequence[int],
        end_ids: Collection[int],
    ) -> list[SampledToken]:
        """The tokens after a text, whose draft may be empty. `logits` (1 + len(draft.ids), vocabulary): after
        its last token and each draft token; None: they are on the device, and `best` has the largest of each.
        """
        if logits is None:
            tokens = path_of(draft, best, None, end_ids)
        else:
            tokens = verify(draft, logits, text.history, text.sampler, end_ids)
        if draft.ids:
            self._record(text, draft, tokens)
        return tokens

    def _record(self, text: BatchedText, draft: Draft, tokens: Sequence[SampledToken]) -> None:
        """Record how much of a draft was accepted."""
        accepted = sum(token.drafted for token in tokens)
        controller = self.speculator.batched
        controller.record_accepted(len(draft.ids), accepted, draft.probs)
        share = accepted / min(accepted + 1, len(draft.ids))  # of those whose acceptance was decided
        known = self._acceptance.get(text.key, controller.acceptance)
        self._acceptance[text.key] = known + OWN_SHARE * (share - known)
        text.count.add(len(draft.ids), accepted, len(tokens))

    def end_step(self, rows: int, tokens: int) -> None:
        """The step had a forward of `rows` tokens, and gave `tokens` in all."""
        step, controller = self._step, self.speculator.batched
        self._step = None
        if step is None:
            return
        seconds = time.perf_counter() - step.begin - step.draft_seconds
        if step.drafted:
            controller.record_step(tokens, rows, step.drafted, step.draft_seconds, seconds, step.texts)
        else:
            controller.record_baseline(seconds, step.texts)

    def forget(self, key: Hashable) -> None:
        """The text has ended."""
        self._acceptance.pop(key, None)
        self.speculator.drafter.forget(key)
