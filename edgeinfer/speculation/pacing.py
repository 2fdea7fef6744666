"""How many tokens to draft: what a pass of n tokens costs, and how often guesses stand, as seen so far.

With acceptance a, draft cost d and pass cost t(n), a draft of k tokens gives (1 - a^(k+1)) / (1 - a) tokens
in t(k + 1) + k·d seconds; the k with the most tokens a second is taken, 0 included.
"""

MOST_DRAFTED = 7
"""Drafted tokens of a pass: with the token before them they are the eight rows that kernels take at once."""
FIRST_GUESS = 0.75
"""Acceptance that is assumed before anything has been seen."""
ROW_SHARE = 0.08
"""What a further row is taken to cost, as a share of a pass of one, before it has been measured."""
MEMORY = 0.9
"""Weight of what was known when something new is seen."""
GAIN = 1.02
"""A draft has to promise so much more tokens a second than none."""
FIRST_PAUSE, LONGEST_PAUSE = 32, 512
"""Tokens without a draft before the next attempt, when drafting doesn't pay; each failure doubles it."""
ATTEMPT = 2
"""Tokens of such an attempt."""


class Pace:
    """The costs and chances of one model and its drafter; kept from answer to answer."""

    def __init__(self) -> None:
        self._pass_seconds: dict[int, float] = {}
        self._draft_seconds: float | None = None
        self._acceptance = FIRST_GUESS
        self._pause = FIRST_PAUSE
        self._waited = 0
        self._attempting = False

    @property
    def acceptance(self) -> float:
        """The chance that a guess stands, if those before it do."""
        return self._acceptance

    def passed(self, rows: int, seconds: float) -> None:
        """A pass of so many rows took so long."""
        known = self._pass_seconds.get(rows, seconds)
        # Disturbed passes are longer, never shorter: what was quick is believed sooner.
        memory = MEMORY if seconds > known else 1 - MEMORY
        self._pass_seconds[rows] = memory * known + (1 - memory) * seconds

    def drafted(self, tokens: int, seconds: float) -> None:
        """A draft of so many tokens took so long."""
        each = seconds / max(1, tokens)
        known = self._draft_seconds
        self._draft_seconds = each if known is None else MEMORY * known + (1 - MEMORY) * each

    def judged(self, drafted: int, stood: int) -> None:
        """Of so many guesses so many stood; the rest fell with the first that didn't."""
        if not drafted:
            return
        for index in range(min(stood + 1, drafted)):
            self._acceptance = MEMORY * self._acceptance + (1 - MEMORY) * float(index < stood)

    def length(self, most: int) -> int:
        """Tokens to draft now, `most` at most; 0: none."""
        most = min(most, MOST_DRAFTED)
        if most < 1:
            return 0
        if 1 not in self._pass_seconds:
            return 0  # the first pass tells what plain decoding costs
        best = max(range(most + 1), key=self._rate)
        if best and self._rate(best) > GAIN * self._rate(0):
            self._pause, self._waited = FIRST_PAUSE, 0
            return best
        self._waited += 1
        if self._waited <= self._pause:
            return 0
        self._waited, self._pause = 0, min(2 * self._pause, LONGEST_PAUSE)
        return min(ATTEMPT, most)

    def least_chances(self, length: int) -> list[float]:
        """For each token of a draft, the chance of being reached from which it is worth its cost."""
        if not self._pass_seconds:
            return [0.0] * length
        worth = 1 / self._rate(length)
        draft = self._draft_seconds or 0.0
        rows = [self.pass_seconds(n) for n in range(1, length + 2)]
        return [min(1.0, max(0.0, draft + rows[i + 1] - rows[i]) / worth) for i in range(length)]

    def gain(self) -> float:
        """Tokens a second with the drafts that are made now, over those without."""
        return (
            max(self._rate(k) for k in range(MOST_DRAFTED + 1)) / self._rate(0) if self._pass_seconds else 1.0
        )

    def pass_seconds(self, rows: int) -> float:
        """Seconds of a pass: as measured, or between and beyond what was measured on a straight line."""
        known = self._pass_seconds
        if rows in known:
            return known[rows]
        below = max((n for n in known if n < rows), default=None)
        above = min((n for n in known if n > rows), default=None)
        if below is None:
            return known[above] if above is not None else 0.0
        if above is None:
            return known[below] + (rows - below) * ROW_SHARE * known.get(1, known[below])
        share = (rows - below) / (above - below)
        return known[below] + share * (known[above] - known[below])

    def _rate(self, length: int) -> float:
        """Tokens a second with drafts of this length."""
        a = min(self._acceptance, 0.999)
        tokens = (1 - a ** (length + 1)) / (1 - a)
        return tokens / (self.pass_seconds(length + 1) + length * (self._draft_seconds or 0.0))
