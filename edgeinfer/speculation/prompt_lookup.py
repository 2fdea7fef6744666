"""Guesses by looking back: what followed the last words when they were said before."""

from bisect import bisect_left
from collections.abc import Sequence

from edgeinfer.sampling.settings import SamplerSettings
from edgeinfer.speculation.drafts import Draft

LONGEST, SHORTEST = 4, 2
"""Tokens at the end of the text that are looked for, in turn."""
FIRST_CHANCES = {2: 0.2, 3: 0.4, 4: 0.7}
"""How likely the token behind a run of so many is thought to follow again, before any guess was judged."""
MEMORY = 0.95
"""Weight of what was thought when one more has been."""


class PromptLookup:
    """An index of all runs of SHORTEST to LONGEST tokens in the text, and in `references` before it.

    The latest place counts. Source: Saxena 2023, "Prompt lookup decoding".
    """

    name = "lookup"

    def __init__(self, references: Sequence[Sequence[int]] = ()) -> None:
        self._references: list[int] = []
        self._limits: list[int] = []
        self._ends = _Ends()
        for text in references:
            self._ends.grow(text, len(self._references))
            self._references += text
            self._limits.append(len(self._references))
        self._reference_ends = self._ends.copy()
        self._text: list[int] = []
        self._source: Sequence[int] | None = None
        self._chances = dict(FIRST_CHANCES)
        self._guessed: tuple[int, int, tuple[int, ...]] | None = None

    @property
    def nbytes(self) -> int:
        return 0

    def propose(
        self,
        history: Sequence[int],
        settings: SamplerSettings,
        least: Sequence[float],
    ) -> Draft:
        """What followed the longest run of tokens at the end of `history` the last time.

        How likely it follows again is learnt for each length of run from the guesses before.
        """
        self._index(history)
        self._learn(history)
        known = len(self._references)
        for length in range(min(LONGEST, len(history)), SHORTEST - 1, -1):
            end = self._ends.before(tuple(history[-length:]), known + len(history))
            if end is None:
                continue
            text_end = known + len(history) if end >= known else self._limits[bisect_left(self._limits, end)]
            wanted = range(end, min(end + self._worthwhile(length, least), text_end))
            guesses = tuple(self._token(place, history) for place in wanted)
            self._guessed = (
                length,
                len(history),
                tuple(self._token(place, history) for place in range(end, min(end + LONGEST, text_end))),
            )
            return Draft(guesses)
        return Draft(())

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
        for guess, came in zip(ids, history[start:], strict=False):
            self._chances[length] = MEMORY * self._chances[length] + (1 - MEMORY) * float(guess == came)
            if guess != came:
                break

    def _token(self, place: int, history: Sequence[int]) -> int:
        known = len(self._references)
        return self._references[place] if place < known else history[place - known]

    def _index(self, history: Sequence[int]) -> None:
        """Take in what has been said since; start afresh where another text goes on."""
        seen = len(self._text)
        # A stream's history only ever grows: it needn't be compared with itself for every token.
        grown = history is self._source and len(history) >= seen
        if not grown and list(history[:seen]) != self._text:
            self._ends, self._text, seen = self._reference_ends.copy(), [], 0
            self._guessed = None
        self._source = history
        self._ends.grow(history, len(self._references), seen)
        self._text += history[seen:]

    def close(self) -> None:
        self._text, self._source = [], None


class _Ends:
    """Run of tokens -> where it last ended, and where it ended the time before that."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, ...], tuple[int, int | None]] = {}

    def copy(self) -> "_Ends":
        ends = _Ends()
        ends._last = dict(self._last)
        return ends

    def grow(self, text: Sequence[int], offset: int, seen: int = 0) -> None:
        """Add the runs of `text`, which begins at place `offset`, that end behind its first `seen` tokens."""
        for end in range(seen + 1, len(text) + 1):
            for length in range(SHORTEST, min(LONGEST, end) + 1):
                run = tuple(text[end - length : end])
                before = self._last.get(run)
                self._last[run] = offset + end, before[0] if before else None

    def before(self, run: tuple[int, ...], place: int) -> int | None:
        """Where the run last ended before `place`."""
        found = self._last.get(run)
        if found is None:
            return None
        return found[0] if found[0] < place else found[1]
