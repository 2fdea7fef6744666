"""Observed costs of the model's forwards and of drafts."""

from collections.abc import Mapping
from dataclasses import dataclass

MAX_DRAFTED = 7
"""Maximum draft tokens per forward: with the token before them, the eight rows that kernels process
at once."""
MAX_ROWS = 16
"""Maximum rows of a forward: a draft may have tree siblings."""
ROW_SHARE = 0.08
"""Assumed cost of each further row, as a share of a single-token forward, before it is measured."""
COST_MEMORY, QUICK_MEMORY = 0.9, 0.5
"""Weight of the known cost when a higher, or a lower one is observed. Disturbances only make forwards longer,
so lower values are adopted faster."""
PLAIN_MEMORY = 0.7
"""Weight of the known baseline time when a forward is slower. Faster ones are adopted sooner here too, but
slow ones count more than above, because drafts are disturbed as well."""
DISTURBED = 1.5
"""An observation counts at most this many times the expected duration."""
COLD = 3.0
"""As DISTURBED, for the cost of probes: cold caches are part of their cost."""
READ_SHARE = 1 / 3
"""Drafter time to prefill a token, relative to drafting one."""
PLAIN_EVERY = 64
"""After this many forwards with drafts, some are made without."""
PLAIN_RUN = 5
"""Number of these in a row. After a draft a forward takes longer, because the draft used the caches; the
first one isn't counted."""
IMPOSSIBLE = 1.2
"""Factor over the cost of separate rows above which a measurement counts as disturbed."""


@dataclass(frozen=True)
class MeasuredCosts:
    """Costs in seconds, measured once when a model is first loaded."""

    passes: Mapping[int, float]
    """By number of rows; 1 is included."""
    drafted_token: float | None = None
    """None: nothing was drafted."""
    draft: float = 0.0
    """Fixed cost of a draft, independent of its length."""

    @property
    def disturbed(self) -> bool:
        """Whether other programs disturbed the measurement: rows together never take longer than
        one by one.
        """
        one = self.passes[1]
        return any(seconds > IMPOSSIBLE * rows * one for rows, seconds in self.passes.items())


class RunningCosts:
    """Current cost estimates: start from the measured costs and follow observations.

    t(n), the cost of a forward of n rows, is t(1) times a relative cost of n rows. t(1) depends on the load
    of the host and the length of the text and changes with each forward; the relative cost changes slowly.
    """

    def __init__(self) -> None:
        self.scale: float | None = None
        """t(1); None before the first observation."""
        self.plain: float | None = None
        """Observed seconds of a single-token forward, fast or slow: the baseline for drafting."""
        self.begin = self.each = 0.0
        """Fixed seconds of a draft, and seconds of each draft token."""
        self._shape = [1 + ROW_SHARE * index for index in range(MAX_ROWS)]
        """Relative costs of forwards of 1, 2, … rows."""
        self._since_plain, self._plain_run = 0, 0

    def measured(self, costs: MeasuredCosts) -> None:
        """Set the stored costs of forwards and drafts, possibly old. They are initial values, except the
        baseline, which is timed first.
        """
        one = costs.passes[1]
        self.scale, self.plain = one, None
        # More rows never take less time, nor more than one by one: other values come from disturbed
        # measurements.
        known = {rows: min(rows, max(1.0, found / one)) for rows, found in costs.passes.items()}
        self._shape = [_on_lines(known, rows) for rows in range(1, MAX_ROWS + 1)]
        if costs.drafted_token is not None:
            self.begin, self.each = costs.draft, costs.drafted_token
        self.time_plain()

    def time_plain(self) -> None:
        """Discard the baseline time."""
        self._since_plain, self._plain_run = PLAIN_EVERY, 0

    @property
    def times_plain(self) -> bool:
        """Whether single-token forwards are needed, to time them."""
        return self.scale is None or self._since_plain >= PLAIN_EVERY

    def passed(self, rows: int, seconds: float) -> None:
        """Record the seconds of a forward of `rows` rows; a single-token one has no draft before it."""
        self._plain_run = self._plain_run + 1 if rows == 1 else 0
        if rows == 1 and (self._plain_run > 1 or self.scale is None):
            self.scale = _learnt(self.scale if self.scale and self.plain else seconds, seconds)
            self.plain = self._plain_behind(min(seconds, DISTURBED * self.scale))
            self._since_plain = 0 if self._plain_run >= PLAIN_RUN else self._since_plain
        elif rows > 1 and self.scale is not None:
            if seconds < self.scale:  # then one row can't take longer: time it again soon
                self.scale = _learnt(self.scale, seconds)
                self.plain = min(self.plain or seconds, DISTURBED * self.scale)
                self._since_plain = PLAIN_EVERY
            known = self._shape[rows - 1]
            self._shape[rows - 1] = max(1.0, _learnt(known, min(seconds / self.scale, DISTURBED * known)))

    def _plain_behind(self, seconds: float) -> float:
        known = self.plain or seconds
        return _mixed(QUICK_MEMORY if seconds < known else PLAIN_MEMORY, known, seconds)

    def stepped(self) -> None:
        """Record that a forward followed a draft or an attempt."""
        self._since_plain += 1
        self._plain_run = 0

    def drafted(self, guesses: int, seconds: float) -> None:
        """Record the seconds of `guesses` draft tokens, including those discarded at the draft's end."""
        known = self.of_draft(guesses)
        if not known:
            self.each = seconds / max(1, guesses)
            return
        # A drafter that has missed tokens, such as a new prompt, prefills them first; this isn't draft token
        # cost.
        changed = _learnt(known, min(seconds, DISTURBED * known)) / known
        self.begin, self.each = changed * self.begin, changed * self.each

    def of_draft(self, guesses: int) -> float:
        """Seconds of a draft; 0 before the first observation."""
        return self.begin + guesses * self.each if guesses else 0.0

    def of_draft_at_most(self, guesses: int, text: int) -> float:
        """Maximum seconds of a draft after `text` tokens if nothing is cached and all are prefilled."""
        return COLD * self.of_draft(guesses) + READ_SHARE * self.each * text

    def of_pass(self, rows: int) -> float:
        """Seconds of a forward of `rows` rows, at most MAX_ROWS; 0 before the first observation."""
        return (self.scale or 0.0) * self._shape[rows - 1]


def _on_lines(known: Mapping[int, float], rows: int) -> float:
    """The cost of a forward of `rows` rows relative to one row: as measured, or linearly interpolated or
    extrapolated.
    """
    if rows in known:
        return known[rows]
    below = max(n for n in known if n < rows)
    above = min((n for n in known if n > rows), default=None)
    if above is None:
        return known[below] + (rows - below) * ROW_SHARE
    return _mixed((above - rows) / (above - below), known[below], known[above])


def _learnt(known: float, seen: float) -> float:
    """A cost after another observation."""
    return _mixed(QUICK_MEMORY if seen < known else COST_MEMORY, known, seen)


def _mixed(share: float, one: float, other: float) -> float:
    return share * one + (1 - share) * other
