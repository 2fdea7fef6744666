"""Running costs of the model's forwards and of drafts, in seconds."""

from collections.abc import Mapping
from dataclasses import dataclass
from operator import add

MAX_DRAFTED = 7
"""Maximum draft tokens per forward: with the token before them, the eight rows of one kernel call."""
MAX_ROWS = 16
"""Maximum rows of a forward: a draft may be a tree."""
ROW_SHARE = 0.08
"""Assumed cost of a further row, as a share of a single-token forward, before it is measured."""
MAX_FACTOR = 1.5
"""An observation counts at most this many times the expected duration: other programs disturb it."""
BASELINE_EVERY, BASELINE_RUN = 64, 3
"""After this many steps with drafts, a few forwards are made without. The first isn't timed: the draft has
evicted its data from the caches."""
SAME_BASELINE, MAX_EVERY = 0.05, 256
"""While the baseline changes by no more than this share, it is timed half as often each time, at least after
this many steps."""


@dataclass(frozen=True)
class MeasuredCosts:
    """Costs measured once when a model is first loaded: of forwards by number of rows, 1 included, of a draft
    token (None: nothing was drafted), of a draft independent of its length, and of a token of a short draft
    vocabulary (None: there is none).
    """

    passes: Mapping[int, float]
    drafted_token: float | None = None
    draft: float = 0.0
    short_token: float | None = None

    @property
    def disturbed(self) -> bool:
        """Whether other programs disturbed it: rows together never take longer than one by one."""
        return any(seconds > 1.2 * rows * self.passes[1] for rows, seconds in self.passes.items())


class DraftCosts:
    """Seconds of forwards and of drafts. A forward of n rows takes a running baseline, which changes with the
    load of the host and the length of the text, times a relative cost, which changes slowly.
    """

    def __init__(self) -> None:
        self.baseline: float | None = None
        """Seconds of a single-token forward; None: not timed yet."""
        self.fixed = self.each = 0.0
        """Cost of a draft independent of its length, and of each draft token, relative to the baseline."""
        self.short = 1.0
        """Cost of a draft token of the short vocabulary, relative to one of all rows."""
        self.is_short = False
        """Whether the short vocabulary is used."""
        self._relative = [1 + ROW_SHARE * index for index in range(MAX_ROWS)]
        self._steps, self._run, self._due = 0, 0, BASELINE_RUN
        self._every, self._timed = BASELINE_EVERY, 0.0
        """The steps with drafts between two timings of the baseline, and the last result."""

    def begin(self, costs: MeasuredCosts) -> None:
        """Start from measured costs, possibly old; the baseline is timed again."""
        one = costs.passes[1]
        known = {rows: min(rows, max(1.0, seconds / one)) for rows, seconds in costs.passes.items()}
        self._relative = [_interpolated(known, rows) for rows in range(1, MAX_ROWS + 1)]
        if costs.drafted_token is not None:
            self.fixed, self.each = costs.draft / one, costs.drafted_token / one
        if costs.drafted_token and costs.short_token is not None:
            self.short = min(1.0, costs.short_token / costs.drafted_token)
        self.baseline, self._due = None, BASELINE_RUN

    def time_baseline(self) -> None:
        """Time single-token forwards before the next draft."""
        self._due = BASELINE_RUN

    @property
    def baselines_due(self) -> int:
        """How many single-token forwards are needed, to time them."""
        return max(self._due, int(self.baseline is None))

    def record_baseline(self, seconds: float) -> None:
        """Record a single-token forward without a draft."""
        self._run, self._due = self._run + 1, max(0, self._due - 1)
        if self._run > 1:
            known = self.baseline
            self.baseline = (
                seconds if known is None else known + 0.3 * (min(seconds, MAX_FACTOR * known) - known)
            )
            if self._due == 0 and self._run == BASELINE_RUN:
                self._set_interval(self.baseline)

    def _set_interval(self, baseline: float) -> None:
        """Set the steps until the next timing of the baseline, which was timed now."""
        is_same = abs(baseline - self._timed) <= SAME_BASELINE * baseline
        self._every = min(MAX_EVERY, 2 * self._every) if is_same else BASELINE_EVERY
        self._timed = baseline

    def record_step(
        self, rows: int, drafted: int, draft: float, forward: float, *, is_cold: bool = False
    ) -> tuple[float, float]:
        """Record a draft and the forward after it. Returns its cost in tokens of baseline decoding, with all
        prefill of the drafter, and without disturbances; 0, 0 before the baseline is known. `is_cold`: the
        draft followed a pause, so that its time says little about others'.
        """
        self._steps, self._run = self._steps + 1, 0
        if self._steps >= self._every:
            self._steps = 0
            self.time_baseline()
        if not self.baseline:
            return 0.0, 0.0
        baseline, expected, usual = self.baseline, self.draft(drafted), self.forward(rows)
        # On a GPU each may include what remained of the other.
        shifted = max(0.0, usual - forward)
        usual_draft = min(draft, (1.0 if is_cold else MAX_FACTOR) * (expected or draft) + shifted)
        # Without a draft, a GPU could have started the forward before the host had the last token.
        usual_forward = min(forward if rows > 1 else max(forward, baseline), MAX_FACTOR * usual)
        if rows > 1:
            if not expected:
                self.each = draft / max(1, drafted) / baseline
                expected = self.draft(drafted)
            self._learn(rows, expected, usual_draft + usual_forward)
        return (draft + usual_forward) / baseline, (usual_draft + usual_forward) / baseline

    def _learn(self, rows: int, draft: float, seconds: float) -> None:
        """Adjust the costs to a draft that was expected to take `draft` and its forward, which took `seconds`
        together.
        """
        assert self.baseline is not None
        if seconds - draft < self.baseline:  # then one row can't take longer
            self.baseline = _learned(self.baseline, seconds - draft)
        expected = draft + self.forward(rows)
        change = _learned(expected, seconds) / expected
        self.fixed, self.each = change * self.fixed, change * self.each
        self._relative[rows - 1] = max(1.0, change * self._relative[rows - 1])

    def draft(self, tokens: int) -> float:
        """Seconds of a draft; 0 before the first observation."""
        return (self.baseline or 0.0) * (self.fixed + tokens * self.token) if tokens else 0.0

    @property
    def token(self) -> float:
        """Cost of each draft token of the vocabulary in use, relative to the baseline."""
        return self.each * (self.short if self.is_short else 1.0)

    def counted_draft(self, seconds: float, tokens: int, unread: int) -> float:
        """What counts of the seconds of a draft of `tokens`, before which the drafter had to prefill as many
        as `unread`.
        """
        prefill = self.draft(unread) / 3  # per token, relative to drafting one
        longest = 2 * MAX_FACTOR * self.draft(tokens) + prefill
        return min(seconds, longest or seconds)

    def relative(self, rows: int) -> float:
        """Seconds of a forward of `rows` rows, at most MAX_ROWS, relative to the baseline."""
        return self._relative[rows - 1]

    def forward(self, rows: int) -> float:
        """Seconds of a forward of `rows` rows, at most MAX_ROWS."""
        return (self.baseline or 0.0) * self.relative(rows)

    def steps(self, longest: int) -> list[float]:
        """Seconds of drafts of 0, 1, 2… tokens for one text, each with its forward."""
        baseline, fixed, token = self.baseline or 0.0, self.fixed, self.token
        forwards = [baseline * relative for relative in self._relative[: longest + 1]]
        drafts = [baseline * (fixed + count * token) for count in range(1, longest + 1)]
        return [forwards[0], *(map(add, forwards[1:], drafts))]

    def row(self, length: int, texts: int = 1) -> float:
        """Relative cost of each further row of a forward with drafts for some texts: single measured ones are
        too uncertain.
        """
        rows = min(texts * (1 + length), MAX_ROWS)
        first = min(rows - 1, max(2, texts))
        return max(0.0, self.relative(rows) - self.relative(first)) / (rows - first)


def _interpolated(known: Mapping[int, float], rows: int) -> float:
    """The relative cost of `rows` rows: as measured, or linearly interpolated or extrapolated."""
    below = max(n for n in known if n <= rows)
    above = min((n for n in known if n >= rows), default=None)
    if above is None or above == below:
        return known[below] + (rows - below) * ROW_SHARE
    return known[below] + (rows - below) / (above - below) * (known[above] - known[below])


def _learned(known: float, seen: float) -> float:
    """A running mean. Disturbances only make forwards longer, so lower values are adopted faster."""
    return known + (0.5 if seen < known else 0.1) * (seen - known)
