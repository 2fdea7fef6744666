"""Passes of several tokens: a drafter proposes, the engine reads all at once, what stands is kept."""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from edgeinfer.language_model import Engine
from edgeinfer.sampling import Sampler
from edgeinfer.speculation.drafts import Draft, Drafter
from edgeinfer.speculation.pacing import Pace
from edgeinfer.speculation.verification import Verified, verify


@dataclass
class DraftCount:
    """What came of the drafts of one answer."""

    drafted: int = 0
    stood: int = 0
    passes: int = 0
    tokens: int = 0

    def plain(self) -> None:
        """A pass of one token, without a draft."""
        self.passes += 1
        self.tokens += 1

    @property
    def accepted_share(self) -> float | None:
        """Guesses that stood; None: there were none."""
        return self.stood / self.drafted if self.drafted else None

    @property
    def tokens_per_pass(self) -> float:
        return self.tokens / self.passes if self.passes else 0.0


class Speculator:
    """One model with its drafter, and how well they get on; streams of the model share it."""

    def __init__(self, engine: Engine, drafter: Drafter) -> None:
        self._engine = engine
        self.drafter = drafter
        self.pace = Pace()

    def draft(self, history: Sequence[int], sampler: Sampler, room: int) -> Draft:
        """Guesses behind `history` that promise to pay, `room` at most."""
        length = self.pace.length(min(room, self._engine.context - len(history) - 1))
        if not length:
            return Draft(())
        begin = time.perf_counter()
        draft = self.drafter.propose(history, sampler.settings, self.pace.least_chances(length))
        if draft.ids:
            self.pace.drafted(len(draft.ids), time.perf_counter() - begin)
        return draft

    def read(
        self,
        draft: Draft,
        history: Sequence[int],
        sampler: Sampler,
        end_ids: Collection[int],
        count: DraftCount,
    ) -> list[Verified]:
        """Read the last token of `history`, all others of which are in the cache, and the draft behind it.

        The tokens that follow; the cache then holds the history and those of them before the last.
        """
        begin = time.perf_counter()
        logits = self._engine.append_all([history[-1], *draft.ids])
        found = verify(draft, logits, history, sampler, end_ids)
        self._engine.rewind(len(history) + len(found) - 1)
        self.pace.passed(1 + len(draft.ids), time.perf_counter() - begin)
        stood = sum(token.drafted for token in found)
        self.pace.judged(len(draft.ids), stood)
        count.drafted += len(draft.ids)
        count.stood += stood
        count.passes += 1
        count.tokens += len(found)
        return found

    def close(self) -> None:
        self.drafter.close()
