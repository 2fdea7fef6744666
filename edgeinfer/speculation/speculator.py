"""Speculative decoding: a drafter proposes tokens, one forward verifies all, the accepted ones are kept."""

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from edgeinfer.engine.protocols import Engine
from edgeinfer.generation.sampled_token import SampledToken
from edgeinfer.sampling import Sampler, SamplerSettings
from edgeinfer.speculation.draft_controller import DraftController, DraftStats
from edgeinfer.speculation.draft_costs import MAX_DRAFTED, MeasuredCosts
from edgeinfer.speculation.drafts import Draft, Drafter
from edgeinfer.speculation.tree_pass import TreePass
from edgeinfer.speculation.verification import leaf_taken, verify

KINDS = ("greedy", "seeded", "drawn")
"""Kinds of completions: with sampling a forward costs more, and acceptance is lower."""
MEASURED_ROWS = (1, MAX_DRAFTED + 1, 4, 2, 6, 3, 5, 7)
"""Row counts of the forwards that are timed when a model is first loaded, each after a warm-up. Unmeasured
ones are interpolated linearly, though on a GPU further rows cost in steps."""
DRAFTS_MEASURED = 4
MEASURING_SECONDS = 0.15
"""No further measurement starts after this time."""


@dataclass
class DraftCount:
    """Draft counters of one completion."""

    drafted: int = 0
    stood: int = 0
    passes: int = 0
    """Number of forwards with drafts."""
    tokens: int = 0
    """Number of tokens from these forwards."""

    @property
    def accepted_share(self) -> float | None:
        """Share of draft tokens that were accepted; None: there were none."""
        return self.stood / self.drafted if self.drafted else None

    def all_stood(self, drafted: int, passes: int) -> None:
        """Add `passes` forwards that gave `drafted` accepted draft tokens, and one token more."""
        self.drafted += drafted
        self.stood += drafted
        self.passes += passes
        self.tokens += drafted + 1

    def tokens_per_pass(self, decoded: int) -> float:
        """Mean tokens per forward of a completion of `decoded` tokens; forwards without a draft give one."""
        return decoded / max(1, decoded - self.tokens + self.passes)


class Speculator:
    """A model with its drafter and draft statistics; shared by all streams of the model."""

    def __init__(self, engine: Engine, drafter: Drafter) -> None:
        self._engine = engine
        self.drafter = drafter
        self.paces = {kind: DraftController() for kind in KINDS}
        self.on_close: Callable[[], None] | None = None
        self._looked: tuple[int, float] | None = None
        """Number of draft tokens made in this step, and the seconds; None: no drafting."""

    def pace_of(self, settings: SamplerSettings) -> DraftController:
        """The draft controller for these settings."""
        if settings.temperature == 0:
            return self.paces["greedy"]
        return self.paces["drawn" if settings.seed is None else "seeded"]

    def measure(self) -> MeasuredCosts:
        """Measure forwards and drafts, on an engine with an empty cache, which is empty again afterwards."""
        spent, found = 0.0, dict[int, float]()
        for rows in MEASURED_ROWS:
            if spent > MEASURING_SECONDS:
                break
            passes = self._passes(rows, MEASURING_SECONDS / (2 * len(MEASURED_ROWS)))
            found[rows] = min(passes[1:])
            spent += found[rows] + sum(passes[1:])
        short, long = (self._quickest_draft(length) for length in (1, MAX_DRAFTED))
        if short is None or long is None or long[0] <= short[0]:
            return MeasuredCosts(found, long[1] / long[0] if long else None)
        each = max(0.0, (long[1] - short[1]) / (long[0] - short[0]))
        return MeasuredCosts(found, each, max(0.0, short[1] - short[0] * each))

    def begin(self, costs: MeasuredCosts, learnt: Mapping[str, DraftStats]) -> None:
        """Set the initial costs, and the stored statistics of some kinds of completions."""
        for kind, pace in self.paces.items():
            pace.costs.measured(costs)
            if kind in learnt:
                pace.begin(learnt[kind])

    def _quickest_draft(self, length: int) -> tuple[int, float] | None:
        """Tokens and seconds of the fastest of several drafts, the first of which runs with cold caches;
        None: nothing was drafted.
        """
        settings, least, found = SamplerSettings(temperature=0), [0.0] * length, list[tuple[float, int]]()
        for _ in range(DRAFTS_MEASURED):
            begin = time.perf_counter()
            draft = self.drafter.propose([0] * MAX_DRAFTED, settings, least)
            found.append((time.perf_counter() - begin, len(draft.ids)))
        seconds, tokens = min(found)
        return (tokens, seconds) if tokens else None

    def _passes(self, rows: int, seconds: float) -> list[float]:
        """Seconds of several forwards: at least two, at most ten, and no further one after `seconds`, not
        counting the first. The first compiles or captures what is missing, so that no completion waits for
        it.
        """
        found = list[float]()
        while len(found) < 2 or (len(found) < 10 and sum(found[1:]) < seconds):
            start = time.perf_counter()
            self._engine.append_all([0] * min(rows, self._engine.context))
            self._engine.rewind(0)
            found.append(time.perf_counter() - start)
        return found

    def draft(self, history: Sequence[int], sampler: Sampler, room: int) -> Draft:
        """Draft tokens after `history` that are predicted to pay, at most `room`."""
        begin, pace = time.perf_counter(), self.pace_of(sampler.settings)
        self._looked = None
        length = pace.length(min(room, self._engine.context - len(history) - 1))
        if not length:
            return Draft(())
        least, further = pace.least_chances(length), pace.further_chances(length)
        draft = self.drafter.propose(history, sampler.settings, least, further)
        # One more token was drafted if none was kept; otherwise this is rare, and its time is added to the
        # others'.
        guesses, seconds = max(1, len(draft.ids)), time.perf_counter() - begin
        self._looked = guesses, min(seconds, pace.costs.of_draft_at_most(guesses, len(history)) or seconds)
        return draft

    def plain(self, sampler: Sampler, seconds: float) -> None:
        """Record the seconds of a forward without a draft."""
        pace = self.pace_of(sampler.settings)
        if self._looked is None:
            pace.passed(seconds)
        else:
            pace.stepped(1, 1, *self._looked, seconds)

    def read(
        self,
        draft: Draft,
        history: Sequence[int],
        sampler: Sampler,
        end_ids: Collection[int],
        count: DraftCount,
    ) -> list[SampledToken]:
        """Process the last token of `history`, whose others are in the cache, and the draft after it.

        Returns the following tokens; the cache then holds the history and these, except the last.
        """
        begin = time.perf_counter()
        tree = TreePass.of(self._engine, draft)
        if tree is None:
            draft = draft._replace(others=()) if draft.others else draft
            logits = self._engine.append_all([history[-1], *draft.ids])
        else:
            logits = tree.read(history[-1])
        found = verify(draft, logits, history, sampler, end_ids)
        if tree is not None:
            tree.keep(leaf_taken(draft, found))
        self._engine.rewind(len(history) + len(found) - 1)
        guesses = len(draft.ids) + len(draft.leaves)
        seconds, pace = time.perf_counter() - begin, self.pace_of(sampler.settings)
        pace.stepped(len(found), 1 + guesses, *(self._looked or (0, 0.0)), seconds)
        stood = sum(token.drafted for token in found)
        pace.judged(len(draft.ids), stood)
        pace.heard(draft.chances, stood)
        count.drafted += guesses
        count.stood += stood
        count.passes += 1
        count.tokens += len(found)
        return found

    def close(self) -> None:
        if self.on_close:
            self.on_close()
        self.drafter.close()
