"""How many tokens to draft: what a pass of n tokens costs, and how often guesses stand, as seen so far.

With acceptance a, pass cost t(n) and draft cost b + k·d, a draft of k tokens gives (1 - a^(k+1)) / (1 - a)
tokens in t(k + 1) + b + k·d seconds; the k with the most tokens a second is taken, 0 included.

That is a promise: guesses are made while the drafter is sure enough, so that those that are judged stand more
often than any would, and a draft that comes to nothing costs too. So what drafting has really earned is kept
as well: it decides how sure a guess must be, and as long as it isn't more than plain decoding gives, drafts
are trials, short ones, that live on a small allowance. Where nothing is promised, drafts pause.
"""

import math
from collections.abc import Mapping, Sequence

MOST_DRAFTED = 7
"""Drafted tokens of a pass: with the token before them they are the eight rows that kernels take at once."""
FIRST_GUESS, FIRST_WEIGHT = 0.75, 2.0
"""Acceptance that is assumed before anything has been seen, and how many guesses that counts for."""
LEAST_ACCEPTANCE = 0.1
LEAST_TRUST, MOST_TRUST, TRUST_STEP = 0.1, 2.0, 0.1
"""Between what that power lies, and by what share a surprise changes it."""
ROW_SHARE = 0.08
"""What a further row is taken to cost, as a share of a pass of one, before it has been measured."""
ACCEPTANCE_MEMORY = 0.95
"""Weight of the guesses before when one more has been judged."""
COST_MEMORY, QUICK_MEMORY = 0.9, 0.5
"""Weight of the known cost when something dearer, or something cheaper, is seen: disturbed passes are longer,
never shorter, so that what is quick is believed sooner.
"""
PLAIN_MEMORY = 0.7
"""Weight of the passes before in what drafting is compared with."""
DISTURBED = 1.5
"""A pass or a draft counts for at most so many times what it should have taken."""
SHAPE_RETURN = 0.92
"""Weight of what rows are known to cost beside what they are hoped to (ROW_SHARE), whenever drafting is
thought over: a slow hour isn't held against drafts for ever.
"""
THINK_EVERY = 16
"""Tokens of a pause after which it is thought over again, if no guess has been judged before."""
PLAIN_EVERY = 64
"""After so many passes with drafts some are made without."""
PLAIN_RUN = 3
"""So many in a row: behind a draft a pass takes longer, as that has been in the caches, so that the first of
them doesn't count.
"""
GAIN = 1.05
"""A draft has to promise, and drafts have to earn, so much more tokens a second than none."""
EARNED_MEMORY = 0.9
"""Weight of the steps before in what drafting earns, when there is one more."""
EVIDENCE = 4
"""Steps with drafts, or with looking for them, after which what they earned is believed."""
TRIALS = 4
"""So many drafts are tried in a row, as the first one pays for what the drafter has missed."""
FIRST_LENGTH = 2
"""Most tokens of the first draft of these."""
ALLOWANCE = 0.015
"""What trials and looks may cost, in tokens of plain decoding a pass; what they gain is theirs too."""
FIRST_PURSE, FULL_PURSE = 0.5, 1.0
"""Tokens that trials and looks may cost at once: in the beginning, and when much has been saved."""
PROBE_LENGTH = 3
"""Tokens of a draft that is made to look, in the shadow, while nothing is promised."""


class Pace:
    """The costs and chances of one model and its drafter; kept from answer to answer.

    t(n) is kept as t(1), which follows the machine's mood and the length of the text from pass to pass, times
    a shape, n rows beside one, which changes slowly.
    """

    def __init__(self) -> None:
        self._scale: float | None = None
        self._shape: dict[int, float] = {1: 1.0}
        self._since_plain, self._plain_run = 0, 0
        self._curve: list[float] = []
        self._draft_begin, self._draft_each = 0.0, 0.0
        """Seconds that a draft takes whatever its length, and those of each guess."""
        self._stood, self._judged = FIRST_GUESS * FIRST_WEIGHT, FIRST_WEIGHT
        self._probe_seconds = 0.0
        self._plain: float | None = None
        """Seconds of a pass of one as they come, quick or not: what drafting is compared with."""
        self._earned_tokens = self._earned_cost = 0.0
        self._steps = 0
        self._trust = 1.0
        """The power to which what a drafter says of its guesses is raised."""
        self._purse, self._trials = FIRST_PURSE, 0
        self._pause = 0
        """Tokens to come for which nothing is drafted."""

    @property
    def acceptance(self) -> float:
        """The chance that a guess stands, if those before it do."""
        return self._stood / self._judged

    @property
    def plain_seconds(self) -> float | None:
        """Seconds of a token of plain decoding, as they come; None before one was seen."""
        return self._plain

    def measured(self, seconds: Mapping[int, float]) -> None:
        """What passes of some rows, one of them 1, took one after the other, maybe long ago: where all
        begins, but for what drafting is compared with, which is timed first.
        """
        self._scale, self._plain, self._since_plain = seconds[1], None, PLAIN_EVERY
        # More rows never take less: what says so was measured while something else ran.
        self._shape = {rows: max(1.0, found / seconds[1]) for rows, found in seconds.items()}
        self._curve = []

    def passed(self, rows: int, seconds: float) -> None:
        """A pass of so many rows took so long."""
        self._purse = min(FULL_PURSE, self._purse + ALLOWANCE)
        self._plain_run = self._plain_run + 1 if rows == 1 else 0
        if rows == 1 and (self._plain_run > 1 or self._scale is None):
            self._scale = _learnt(self._scale or seconds, seconds)
            self._plain = _mixed(PLAIN_MEMORY, self._plain or seconds, min(seconds, DISTURBED * self._scale))
            self._since_plain = 0 if self._plain_run >= PLAIN_RUN else self._since_plain
        elif rows > 1 and self._scale is not None:
            self._since_plain += 1
            if seconds < self._scale:  # then one row takes no longer, by now: it is time to look how long
                self._scale = _learnt(self._scale, seconds)
                self._plain = min(self._plain or seconds, DISTURBED * self._scale)
                self._since_plain = PLAIN_EVERY
            known = self._shape_of(rows)
            self._shape[rows] = max(1.0, _learnt(known, min(seconds / self._scale, DISTURBED * known)))
            self._curve = []

    def draft_measured(self, begin: float, each: float) -> None:
        """What a draft takes whatever its length, and each guess: where all begins."""
        self._draft_begin, self._draft_each = begin, each

    def drafted(self, guesses: int, seconds: float) -> None:
        """So many guesses, those that a draft was ended before among them, took so long."""
        known = self._draft_cost(guesses)
        if not known:
            self._draft_each = seconds / max(1, guesses)
            return
        # A drafter that has missed something, as a new prompt, reads that first: no cost of the guesses.
        changed = _learnt(known, min(seconds, DISTURBED * known)) / known
        self._draft_begin, self._draft_each = changed * self._draft_begin, changed * self._draft_each

    def _draft_cost(self, guesses: int) -> float:
        """Seconds of a draft; 0 before one was seen."""
        return self._draft_begin + guesses * self._draft_each if guesses else 0.0

    def stepped(self, tokens: int, rows: int, guesses: int, looked: float, read: float) -> None:
        """A step with a draft, or with looking for one, gave so many tokens: so many guesses took `looked`
        seconds, and a pass of so many rows took `read`.
        """
        if self._plain is None:
            return
        usual = min(looked, DISTURBED * (self._draft_cost(guesses) or looked))
        missed, cost = (looked - usual) / self._plain, usual / self._plain
        # A pass of one is what plain decoding would have made, and no measure of it.
        cost += min(read, DISTURBED * self.pass_seconds(rows)) / self._plain if rows > 1 else 1.0
        self._since_plain += rows == 1
        self._plain_run = 0
        self._steps += 1
        self._trials = max(0, self._trials - 1)
        self._earned_tokens = EARNED_MEMORY * self._earned_tokens + tokens
        self._earned_cost = EARNED_MEMORY * self._earned_cost + cost
        # Trials pay what they took, disturbed or not, but for what was missed: that is read for all drafts to
        # come, if there will be any.
        paid = (looked + (read if rows > 1 else self._plain)) / self._plain
        free = missed if self._steps < EVIDENCE or self.earns else 0.0
        self._purse = min(FULL_PURSE, self._purse + tokens - (paid - free))

    @property
    def earns(self) -> bool:
        """Whether drafts are seen to give more than plain decoding."""
        return self._steps >= EVIDENCE and self._earned_tokens > GAIN * self._earned_cost

    @property
    def _earned_rate(self) -> float:
        """Tokens in the time of a plain one by steps with drafts; 1 before there is evidence."""
        return self._earned_tokens / self._earned_cost if self._steps >= EVIDENCE else 1.0

    def probed(self, tokens: int, seconds: float) -> None:
        """To look for so many guesses took so long, while none are wanted.

        What the drafter had missed is read first, so that only a quick look tells what a guess costs.
        """
        self._probe_seconds = seconds
        if self._plain is not None:
            self._purse -= seconds / self._plain
        known = self._draft_cost(tokens)
        if seconds < known:
            self._draft_begin *= seconds / known
            self._draft_each *= seconds / known

    def stood(self, chance: float) -> None:
        """A guess stood (1.0), fell (0.0), or would have stood with this chance."""
        self._pause = 0
        self._stood = ACCEPTANCE_MEMORY * self._stood + chance
        self._judged = ACCEPTANCE_MEMORY * self._judged + 1

    def judged(self, drafted: int, stood: int) -> None:
        """Of so many guesses so many stood; the rest fell with the first that didn't."""
        for index in range(min(stood + 1, drafted)):
            self.stood(float(index < stood))

    def heard(self, chances: Sequence[float], stood: int) -> None:
        """What a drafter thought of its guesses, of which so many stood before the first that fell.

        A guess that its drafter is unsure of, as the model may be too, stands more often than it says: what
        it says is raised to a power that is learnt, so that on average as much is expected as comes.
        """
        for place, chance in enumerate(chances[: stood + 1]):
            surprise = chance**self._trust - (place < stood)
            self._trust = min(MOST_TRUST, max(LEAST_TRUST, self._trust * math.exp(TRUST_STEP * surprise)))

    def length(self, most: int) -> int:
        """Tokens to draft now, `most` at most; 0: none."""
        most = min(most, MOST_DRAFTED)
        if most < 1 or self._scale is None or self._since_plain >= PLAIN_EVERY:
            return 0  # a pass of one token tells what plain decoding costs
        if not self.earns:
            if not self._trials and self._purse <= 0:
                return 0
            self._trials = self._trials or TRIALS
            most = min(most, FIRST_LENGTH) if self._trials == TRIALS else most
        if self._pause:
            self._pause -= 1
            return 0
        rates = self._rates(most)
        best = max(range(most + 1), key=rates.__getitem__)
        if rates[best] > GAIN * rates[0]:
            return best
        self._pause = THINK_EVERY
        for rows, known in self._shape.items():
            self._shape[rows] = min(known, _mixed(SHAPE_RETURN, known, 1 + ROW_SHARE * (rows - 1)))
        self._curve = []
        return 0

    def probes(self) -> bool:
        """Asked for each token for which nothing is drafted: whether to look if drafts would stand."""
        if self._plain is None or self.earns:
            return False
        return self._purse > 0 and self._purse >= min(FULL_PURSE, self._probe_seconds / self._plain)

    def least_chances(self, length: int) -> list[float]:
        """For each token of a draft, the chance of being reached from which it is worth its row in the pass.

        A token more is worth the time in which the way things go earns one.
        """
        if self._scale is None:
            return [0.0] * length
        return self._said([self._row_chance(self._scale, length)] * length)

    def further_chances(self, length: int) -> list[float]:
        """For each token of a draft, the chance of being reached from which one more is worth being guessed
        behind it: that stands with the acceptance, and takes time to guess too.
        """
        if self._scale is None:
            return [0.0] * length
        each, stands = self._draft_each / self._worth(self._scale), max(self.acceptance, LEAST_ACCEPTANCE)
        return self._said([(each + self._row_chance(self._scale, length)) / stands] * length)

    def _row_chance(self, scale: float, length: int) -> float:
        """The chance of being reached that pays for a row of a draft of this length, all alike: costs that
        are measured one by one are too uncertain to tell a row from the next.
        """
        rows = self._pass_costs()
        return max(0.0, rows[length] - rows[0]) / (length * self._worth(scale))

    def _said(self, chances: Sequence[float]) -> list[float]:
        """What a drafter must say where these chances are wanted."""
        return [min(1.0, chance) ** (1 / self._trust) for chance in chances]

    def _worth(self, scale: float) -> float:
        """The seconds in which the way things go earns a token."""
        return scale / max(self._earned_rate, 1.0)

    def pass_seconds(self, rows: int) -> float:
        """Seconds of a pass, 0 before one was seen."""
        return (self._scale or 0.0) * self._shape_of(rows)

    def _shape_of(self, rows: int) -> float:
        """A pass of `rows` beside one of 1: as measured, or between and beyond that on a straight line."""
        known = self._shape
        if rows in known:
            return known[rows]
        below = max(n for n in known if n < rows)
        above = min((n for n in known if n > rows), default=None)
        if above is None:
            return known[below] + (rows - below) * ROW_SHARE
        return _mixed((above - rows) / (above - below), known[below], known[above])

    def _pass_costs(self) -> list[float]:
        """Seconds of passes of 1, 2, … rows."""
        if not self._curve:
            self._curve = [self._shape_of(rows) for rows in range(1, MOST_DRAFTED + 2)]
        scale = self._scale or 0.0
        return [scale * share for share in self._curve]

    def _rates(self, most: int) -> Sequence[float]:
        """Tokens a second with drafts of 0, 1, … `most` tokens."""
        costs = self._pass_costs()
        rates, tokens, reached = [], 0.0, 1.0
        for length in range(most + 1):
            tokens += reached
            reached *= self.acceptance
            rates.append(tokens / (costs[length] + self._draft_cost(length)))
        return rates


def _learnt(known: float, seen: float) -> float:
    """A cost after another has been seen."""
    return _mixed(QUICK_MEMORY if seen < known else COST_MEMORY, known, seen)


def _mixed(share: float, one: float, other: float) -> float:
    return share * one + (1 - share) * other
