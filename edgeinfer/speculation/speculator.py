"""Passes of several tokens: a drafter proposes, the engine reads all at once, what stands is kept."""

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
"""Of answers: a pass costs more where tokens are drawn, and guesses stand less often."""
MEASURED_ROWS = (1, MAX_DRAFTED + 1, 4, 2, 6, 3, 5, 7)
"""The passes that are timed when a model is first loaded, each behind one to warm up. What no time is left
for is taken to lie on a line, though on a GPU further rows cost by steps.
"""
DRAFTS_MEASURED = 4
MEASURING_SECONDS = 0.15
"""No further ones are begun after this time."""


@dataclass
class DraftCount:
    """What came of the drafts of one answer."""

    drafted: int = 0
    stood: int = 0
    passes: int = 0
    """With drafts."""
    tokens: int = 0
    """Of these passes."""

    @property
    def accepted_share(self) -> float | None:
        """Guesses that stood; None: there were none."""
        return self.stood / self.drafted if self.drafted else None

    def all_stood(self, drafted: int, passes: int) -> None:
        """So many tokens, and one behind them, came of so many passes."""
        self.drafted += drafted
        self.stood += drafted
        self.passes += passes
        self.tokens += drafted + 1

    def tokens_per_pass(self, decoded: int) -> float:
        """Of all passes of an answer of so many tokens, each of which but these has given one."""
        return decoded / max(1, decoded - self.tokens + self.passes)


class Speculator:
    """One model with its drafter, and how well they get on; streams of the model share it."""

    def __init__(self, engine: Engine, drafter: Drafter) -> None:
        self._engine = engine
        self.drafter = drafter
        self.paces = {kind: DraftController() for kind in KINDS}
        self.on_close: Callable[[], None] | None = None
        self._looked: tuple[int, float] | None = None
        """Guesses that were made for the draft of this step, and in how many seconds; None: nobody looked."""

    def pace_of(self, settings: SamplerSettings) -> DraftController:
        """That of an answer with these settings."""
        if settings.temperature == 0:
            return self.paces["greedy"]
        return self.paces["drawn" if settings.seed is None else "seeded"]

    def measure(self) -> MeasuredCosts:
        """What passes and drafts cost, on an engine that has read nothing yet, which it hasn't afterwards."""
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
        """Take these costs for the first answer's; go on from what was learnt of some kinds of answers."""
        for kind, pace in self.paces.items():
            pace.costs.measured(costs)
            if kind in learnt:
                pace.begin(learnt[kind])

    def _quickest_draft(self, length: int) -> tuple[int, float] | None:
        """Tokens and seconds of the quickest of some drafts, the first of which finds everything cold; None:
        nothing was drafted.
        """
        settings, least, found = SamplerSettings(temperature=0), [0.0] * length, list[tuple[float, int]]()
        for _ in range(DRAFTS_MEASURED):
            begin = time.perf_counter()
            draft = self.drafter.propose([0] * MAX_DRAFTED, settings, least)
            found.append((time.perf_counter() - begin, len(draft.ids)))
        seconds, tokens = min(found)
        return (tokens, seconds) if tokens else None

    def _passes(self, rows: int, seconds: float) -> list[float]:
        """Seconds of some passes: two at least, ten at most, and no further one when those behind the first
        have taken `seconds`. The first one compiles, or records as a graph, what isn't there yet: no answer
        waits for that.
        """
        found = list[float]()
        while len(found) < 2 or (len(found) < 10 and sum(found[1:]) < seconds):
            start = time.perf_counter()
            self._engine.append_all([0] * min(rows, self._engine.context))
            self._engine.rewind(0)
            found.append(time.perf_counter() - start)
        return found

    def draft(self, history: Sequence[int], sampler: Sampler, room: int) -> Draft:
        """Guesses behind `history` that promise to pay, `room` at most."""
        begin, pace = time.perf_counter(), self.pace_of(sampler.settings)
        self._looked = None
        length = pace.length(min(room, self._engine.context - len(history) - 1))
        if not length:
            return Draft(())
        least, further = pace.least_chances(length), pace.further_chances(length)
        draft = self.drafter.propose(history, sampler.settings, least, further)
        # One guess more was made where none was kept; elsewhere that is rare, and is taken for the others'.
        guesses, seconds = max(1, len(draft.ids)), time.perf_counter() - begin
        self._looked = guesses, min(seconds, pace.costs.of_draft_at_most(guesses, len(history)) or seconds)
        return draft

    def plain(self, sampler: Sampler, seconds: float) -> None:
        """A pass without a draft took so long."""
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
        """Read the last token of `history`, all others of which are in the cache, and the draft behind it.

        The tokens that follow; the cache then holds the history and those of them before the last.
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
