"""What passes of a model and drafts for it take, as seen so far."""

from collections.abc import Mapping
from dataclasses import dataclass

MAX_DRAFTED = 7
"""Drafted tokens of a pass: with the token before them they are the eight rows that kernels take at once."""
MAX_ROWS = 16
"""Of a pass: a draft may have leaves beside it."""
ROW_SHARE = 0.08
"""What a further row is taken to cost, as a share of a pass of one, before it has been measured."""
COST_MEMORY, QUICK_MEMORY = 0.9, 0.5
"""Weight of the known cost when something dearer, or something cheaper, is seen: disturbed passes are longer,
never shorter, so that what is quick is believed sooner.
"""
PLAIN_MEMORY = 0.7
"""Weight of what plain decoding is known to take when a pass is slower; a quicker one is believed sooner here
too, but not so little the others: drafts are disturbed as well.
"""
DISTURBED = 1.5
"""A pass or a draft counts for at most so many times what it should have taken."""
COLD = 3.0
"""As DISTURBED, for what trials pay: that what they need has been driven from the caches is their cost."""
READ_SHARE = 1 / 3
"""What a drafter takes to read a token of a text, of what it takes to guess one."""
PLAIN_EVERY = 64
"""After so many passes with drafts some are made without."""
PLAIN_RUN = 5
"""So many in a row: behind a draft a pass takes longer, as that has been in the caches, so that the first of
them doesn't count.
"""
IMPOSSIBLE = 1.2
"""Times what rows take one by one: they were disturbed."""


@dataclass(frozen=True)
class MeasuredCosts:
    """What is measured once, when a model is first loaded, in seconds."""

    passes: Mapping[int, float]
    """By their rows, one of them 1."""
    drafted_token: float | None = None
    """None: nothing was drafted."""
    draft: float = 0.0
    """Of a draft whatever its length."""

    @property
    def disturbed(self) -> bool:
        """Whether other programs must have run meanwhile: rows never take longer together than one by one."""
        one = self.passes[1]
        return any(seconds > IMPOSSIBLE * rows * one for rows, seconds in self.passes.items())


class RunningCosts:
    """What is known by now: begins with what was measured, and follows what comes.

    t(n), what a pass of n rows takes, is kept as t(1), which follows the machine's mood and the length of
    the text from pass to pass, times a shape, n rows beside one, which changes slowly.
    """

    def __init__(self) -> None:
        self.scale: float | None = None
        """t(1); None before one was seen."""
        self.plain: float | None = None
        """Seconds of a pass of one as they come, quick or not: what drafting is compared with."""
        self.begin = self.each = 0.0
        """Seconds that a draft takes whatever its length, and those of each guess."""
        self._shape = [1 + ROW_SHARE * index for index in range(MAX_ROWS)]
        """Of passes of 1, 2, … rows."""
        self._since_plain, self._plain_run = 0, 0

    def measured(self, costs: MeasuredCosts) -> None:
        """What passes and drafts took one after the other, maybe long ago: where all begins, but for what
        drafting is compared with, which is timed first.
        """
        one = costs.passes[1]
        self.scale, self.plain = one, None
        # More rows never take less, nor longer than one by one: what says so was measured while others ran.
        known = {rows: min(rows, max(1.0, found / one)) for rows, found in costs.passes.items()}
        self._shape = [_on_lines(known, rows) for rows in range(1, MAX_ROWS + 1)]
        if costs.drafted_token is not None:
            self.begin, self.each = costs.draft, costs.drafted_token
        self.time_plain()

    def time_plain(self) -> None:
        """What a pass of one takes is no longer known."""
        self._since_plain, self._plain_run = PLAIN_EVERY, 0

    @property
    def times_plain(self) -> bool:
        """Whether passes of one are wanted, to time them."""
        return self.scale is None or self._since_plain >= PLAIN_EVERY

    def passed(self, rows: int, seconds: float) -> None:
        """A pass of so many rows took so long; if of one, without a draft before it."""
        self._plain_run = self._plain_run + 1 if rows == 1 else 0
        if rows == 1 and (self._plain_run > 1 or self.scale is None):
            self.scale = _learnt(self.scale if self.scale and self.plain else seconds, seconds)
            self.plain = self._plain_behind(min(seconds, DISTURBED * self.scale))
            self._since_plain = 0 if self._plain_run >= PLAIN_RUN else self._since_plain
        elif rows > 1 and self.scale is not None:
            if seconds < self.scale:  # then one row takes no longer, by now: it is time to look how long
                self.scale = _learnt(self.scale, seconds)
                self.plain = min(self.plain or seconds, DISTURBED * self.scale)
                self._since_plain = PLAIN_EVERY
            known = self._shape[rows - 1]
            self._shape[rows - 1] = max(1.0, _learnt(known, min(seconds / self.scale, DISTURBED * known)))

    def _plain_behind(self, seconds: float) -> float:
        known = self.plain or seconds
        return _mixed(QUICK_MEMORY if seconds < known else PLAIN_MEMORY, known, seconds)

    def stepped(self) -> None:
        """A pass came behind a draft, or behind looking for one."""
        self._since_plain += 1
        self._plain_run = 0

    def drafted(self, guesses: int, seconds: float) -> None:
        """So many guesses, those that a draft was ended before among them, took so long."""
        known = self.of_draft(guesses)
        if not known:
            self.each = seconds / max(1, guesses)
            return
        # A drafter that has missed something, as a new prompt, reads that first: no cost of the guesses.
        changed = _learnt(known, min(seconds, DISTURBED * known)) / known
        self.begin, self.each = changed * self.begin, changed * self.each

    def of_draft(self, guesses: int) -> float:
        """Seconds of a draft; 0 before one was seen."""
        return self.begin + guesses * self.each if guesses else 0.0

    def of_draft_at_most(self, guesses: int, text: int) -> float:
        """Seconds that a draft behind so many tokens may take when nothing is at hand and all are read."""
        return COLD * self.of_draft(guesses) + READ_SHARE * self.each * text

    def of_pass(self, rows: int) -> float:
        """Seconds of a pass of so many rows, MAX_ROWS at most; 0 before one was seen."""
        return (self.scale or 0.0) * self._shape[rows - 1]


def _on_lines(known: Mapping[int, float], rows: int) -> float:
    """A pass of `rows` beside one of 1: as measured, or between and beyond that on a straight line."""
    if rows in known:
        return known[rows]
    below = max(n for n in known if n < rows)
    above = min((n for n in known if n > rows), default=None)
    if above is None:
        return known[below] + (rows - below) * ROW_SHARE
    return _mixed((above - rows) / (above - below), known[below], known[above])


def _learnt(known: float, seen: float) -> float:
    """A cost after another has been seen."""
    return _mixed(QUICK_MEMORY if seen < known else COST_MEMORY, known, seen)


def _mixed(share: float, one: float, other: float) -> float:
    return share * one + (1 - share) * other
