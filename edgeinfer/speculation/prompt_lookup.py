"""Guesses by looking back: what followed the last words when they were said before."""

from collections.abc import Sequence

from edgeinfer.sampling.settings import SamplerSettings
from edgeinfer.speculation.drafts import Draft
from edgeinfer.speculation.lookup_index import LookupIndex

LONGEST, SHORTEST = 4, 2
"""Tokens at the end of the text that are looked for, in turn."""
FIRST_CHANCES = {2: 0.2, 3: 0.4, 4: 0.7}
"""How likely the token behind a run of so many is thought to follow again, before any guess was judged."""
MEMORY = 0.95
"""Weight of what was thought when one more has been."""


class PromptLookup:
    """An index of all runs of SHORTEST to LONGEST tokens in the text; `references` are texts to look at too.

    The longest run counts, in the text before the references, there at its latest place.
    Source: Saxena 2023, "Prompt lookup decoding".
    """

    name = "lookup"

    def __init__(self, references: Sequence[Sequence[int]] = ()) -> None:
        texts = [text for text in references if len(text) > SHORTEST]
        self._references = LookupIndex(texts, range(SHORTEST, LONGEST + 1)) if texts else None
        self._ends = _Ends()
        self._text: list[int] = []
        self._source: Sequence[int] | None = None
        self._chances = dict(FIRST_CHANCES)
        self._guessed: tuple[int, int, tuple[int, ...]] | None = None

    @property
    def nbytes(self) -> int:
        return self._references.nbytes if self._references else 0

    def propose(
        self,
        history: Sequence[int],
        settings: SamplerSettings,
        least: Sequence[float],
        further: Sequence[float] = (),
    ) -> Draft:
        """What followed the longest run of tokens at the end of `history` the last time.

        How likely it follows again is learnt for each length of run from the guesses before.
        """
        self._index(history)
        self._learn(history)
        for length in range(min(LONGEST, len(history)), SHORTEST - 1, -1):
            found = self._following(history, length, max(LONGEST, len(least)))
            if found:
                self._guessed = length, len(history), found
                return Draft(found[: self._worthwhile(length, least)])
        return Draft(())

    def _following(self, history: Sequence[int], length: int, most: int) -> tuple[int, ...]:
        """What followed the last `length` tokens, `most` at most; nothing if they are new."""
        end = self._ends.before(tuple(history[-length:]), len(history))
        if end is not None:
            return tuple(history[end : end + most])
        return self._references.following(history, length, most) if self._references else ()

    def _worthwhile(self, length: int, least: Sequence[float]) -> int:
        """How many tokens behind a run of so many are likely enough to be reached."""
        reached = 1.0
        for count, needed in enumerate(least):
            reached *= self._chances[length]
            if reached < needed:
                return count
        return len(least)

    def _learn(self, history: Sequence[int]) -> None:
        """Compare the last guess with what came."""
        if self._guessed is None:
            return
        length, start, ids = self._guessed
        self._guessed = None
        for guess, came in zip(ids, history[start : start + len(ids)], strict=False):
            self._chances[length] = MEMORY * self._chances[length] + (1 - MEMORY) * float(guess == came)
            if guess != came:
                break

    def _index(self, history: Sequence[int]) -> None:
        """Take in what has been said since; start afresh where another text goes on."""
        seen = len(self._text)
        # A stream's history only ever grows: it needn't be compared with itself for every token.
        grown = history is self._source and len(history) >= seen
        if not grown and list(history[:seen]) != self._text:
            self._ends, self._text, seen = _Ends(), [], 0
            self._guessed = None
        self._source = history
        self._ends.grow(history, seen)
        self._text += history[seen:]

    def close(self) -> None:
        self._text, self._source = [], None


class _Ends:
    """Run of tokens -> where it last ended, and where it ended the time before that."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, ...], tuple[int, int | None]] = {}

    def grow(self, text: Sequence[int], seen: int) -> None:
        """Add the runs of `text` that end behind its first `seen` tokens."""
        for end in range(seen + 1, len(text) + 1):
            for length in range(SHORTEST, min(LONGEST, end) + 1):
                run = tuple(text[end - length : end])
                before = self._last.get(run)
                self._last[run] = end, before[0] if before else None

    def before(self, run: tuple[int, ...], place: int) -> int | None:
        """Where the run last ended before `place`."""
        found = self._last.get(run)
        if found is None:
            return None
        return found[0] if found[0] < place else found[1]
