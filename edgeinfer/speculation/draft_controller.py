"""Controls the draft length, from the costs of forwards and the observed acceptance.

With acceptance a, forward cost t(n) and draft cost b + k·d, a draft of k tokens gives (1 - a^(k+1)) / (1 - a)
tokens in t(k + 1) + b + k·d seconds. The k with the most tokens per second is used, 0 included.

This prediction is biased. Draft tokens are made only while the drafter is confident enough, so verified ones
are accepted more often than average ones, and an empty draft also costs time. The actual gain of drafting is
therefore measured too. It sets the required confidence. Until drafting is known to help, drafts are short
probes within a small budget. When the budget is spent, drafting pauses for some tokens: `rest`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from edgeinfer.speculation.draft_costs import COLD, DISTURBED, MAX_DRAFTED, PLAIN_EVERY, RunningCosts

FIRST_GUESS, FIRST_WEIGHT = 0.75, 2.0
"""Initial acceptance, and the number of draft tokens that it counts for."""
MIN_ACCEPTANCE = 0.1
ACCEPTANCE_MEMORY = 0.95
"""Weight of the previous draft tokens when one more has been verified."""
MIN_TRUST, MAX_TRUST, TRUST_STEP = 0.1, 2.0, 0.1
"""Bounds of the exponent applied to a drafter's probabilities, and its relative change per surprise."""
GAIN = 1.05
"""Minimum factor in tokens per second that a draft has to predict, and drafting has to reach."""
EARNED_MEMORY = 0.9
"""Weight of the previous steps in the measured gain of drafting."""
EVIDENCE = 3
"""Number of steps with drafts, or attempts, after which their measured gain is used."""
TRIALS = 4
"""Number of drafts in a series of probes if they are predicted to pay; otherwise a series continues while
each pays."""
FIRST_LENGTH = 2
"""Maximum tokens of the first draft in a series of probes, and of those predicted not to pay."""
ALLOWANCE = 0.01
"""Probe budget per forward, in tokens of baseline decoding; gains of probes are added."""
FIRST_PURSE, FULL_PURSE = 0.25, 1.0
"""Probe budget in tokens: initial value and maximum."""
MIN_REST = 8
"""Minimum pause in tokens: an attempt costs a small model a few hundredths of a token."""


@dataclass(frozen=True)
class DraftStats:
    """Draft statistics, for a later process."""

    acceptance: float
    trust: float
    tokens: float
    """Tokens of the last steps with drafts."""
    cost: float
    """Cost of these steps, in tokens of baseline decoding."""
    steps: float
    purse: float


class DraftController:
    """Costs and acceptance of one model and its drafter for one kind of completion; kept between
    completions.
    """

    def __init__(self) -> None:
        self.costs = RunningCosts()
        self._stood, self._judged = FIRST_GUESS * FIRST_WEIGHT, FIRST_WEIGHT
        self._earned_tokens = self._earned_cost = 0.0
        self._steps = 0
        self._trust = 1.0
        """Exponent applied to the drafter's probabilities."""
        self._purse = FIRST_PURSE
        self._trials, self._first, self._gives = 0, False, False
        """Number of drafts left in a series of probes that is predicted to pay; whether this one is the
        first; and whether the last one gained more than it cost."""
        self._known = False
        """Whether any draft was tried."""
        self.rest = 0
        """Number of tokens without drafting; decoding one of them decrements it."""

    @property
    def acceptance(self) -> float:
        """The probability that a draft token is accepted, given that those before it are."""
        return self._stood / self._judged

    @property
    def learnt(self) -> DraftStats:
        """The statistics, with a weight of at most EVIDENCE steps, because another text may differ."""
        share = min(1.0, EVIDENCE / max(1, self._steps))
        tokens, cost = share * self._earned_tokens, share * self._earned_cost
        purse = self._purse - ALLOWANCE * self.rest
        return DraftStats(self.acceptance, self._trust, tokens, cost, min(self._steps, EVIDENCE), purse)

    def begin(self, learnt: DraftStats) -> None:
        """Start from stored statistics."""
        self._stood, self._judged = EVIDENCE * learnt.acceptance, float(EVIDENCE)
        self._earned_tokens, self._earned_cost, self._steps = learnt.tokens, learnt.cost, int(learnt.steps)
        self._trust, self._purse, self._known = learnt.trust, learnt.purse, True

    def passed(self, seconds: float) -> None:
        """Record the seconds of a single-token forward without a draft."""
        self._purse = min(FULL_PURSE, self._purse + ALLOWANCE)
        self.costs.passed(1, seconds)

    def stepped(self, tokens: int, rows: int, guesses: int, looked: float, read: float) -> None:
        """Record a step with a draft or an attempt: `tokens` resulting tokens, `guesses` draft tokens in
        `looked` seconds, and a forward of `rows` tokens in `read` seconds.
        """
        costs, plain = self.costs, self.costs.plain
        costs.stepped()
        if plain is None:
            return
        usual = min(looked, DISTURBED * (costs.of_draft(guesses) or looked))
        # A single-token forward is the same as in baseline decoding, and no measure of drafting.
        due = costs.of_pass(rows) if rows > 1 else plain
        cost = (usual + (min(read, DISTURBED * due) if rows > 1 else plain)) / plain
        paid = looked / plain + (min(read, COLD * due) / plain if rows > 1 else 1.0)
        first, self._first, self._trials = self._first, False, max(0, self._trials - 1)
        if first:
            # Other work has evicted its data from the caches: the time only counts as probe cost.
            self._gives = tokens > 1
        else:
            self._gives = tokens > cost
            self._steps += 1
            self._earned_tokens = EARNED_MEMORY * self._earned_tokens + tokens
            self._earned_cost = EARNED_MEMORY * self._earned_cost + cost
            if rows > 1:
                costs.drafted(guesses, looked)
                costs.passed(rows, read)
        # Prefill of missed tokens also serves later drafts, if there are any.
        free = (looked - usual) / plain if self.earns or not self._known else 0.0
        self._known = True
        self._purse = min(FULL_PURSE, self._purse + ALLOWANCE + tokens - (paid - free))

    @property
    def earns(self) -> bool:
        """Whether drafting is measured to be faster than baseline decoding."""
        return self._steps >= EVIDENCE and self._earned_tokens > GAIN * self._earned_cost

    @property
    def _earned_rate(self) -> float:
        """Tokens per baseline token time of steps with drafts; 1 before there is evidence."""
        return self._earned_tokens / self._earned_cost if self._steps >= EVIDENCE else 1.0

    def judged(self, drafted: int, stood: int) -> None:
        """Record that `stood` of `drafted` draft tokens were accepted; those after the first rejected one
        don't count.
        """
        for index in range(min(stood + 1, drafted)):
            self._stood = ACCEPTANCE_MEMORY * self._stood + (index < stood)
            self._judged = ACCEPTANCE_MEMORY * self._judged + 1

    def heard(self, chances: Sequence[float], stood: int) -> None:
        """Record the drafter's probabilities of its draft tokens, of which `stood` were accepted before the
        first rejection.

        A draft token of low probability is accepted more often than its drafter's probability, because the
        target may be unsure too. The probability is raised to a learned exponent, so that the expected number
        of accepted tokens matches the mean.
        """
        trust = self._trust
        for place, chance in enumerate(chances[: stood + 1]):
            surprise = chance**trust - (place < stood)
            trust = min(MAX_TRUST, max(MIN_TRUST, trust * math.exp(TRUST_STEP * surprise)))
        self._trust = trust

    def length(self, most: int) -> int:
        """Number of tokens to draft now, at most `most`; 0: none."""
        most = min(most, MAX_DRAFTED)
        if most < 1 or self.costs.times_plain:
            return 0
        rates = self._rates(most)
        best = max(range(most + 1), key=rates.__getitem__)
        promised = rates[best] > GAIN * rates[0]
        if promised and self.earns:
            return best
        if not self._gives and not (promised and self._trials):
            if self._purse <= 0:
                self._take_rest()
                return 0
            self._first, self._trials = True, TRIALS
        return best if promised and not self._first else min(most, FIRST_LENGTH)

    def _take_rest(self) -> None:
        """Pause drafting until the probe budget has recovered."""
        self.rest = max(MIN_REST, math.ceil(-self._purse / ALLOWANCE))
        self._purse += ALLOWANCE * self.rest
        if self.rest >= PLAIN_EVERY:
            self.costs.time_plain()

    def least_chances(self, length: int) -> list[float]:
        """For each draft token, the minimum probability of being reached for which it is worth its row in the
        forward.

        One more token is worth the time per token at the current rate.
        """
        scale = self.costs.scale
        return self._said(0.0 if scale is None else self._row_chance(scale, length), length)

    def further_chances(self, length: int) -> list[float]:
        """For each draft token, the minimum probability of being reached for drafting another one after it.
        The latter is accepted with the mean acceptance, and also takes drafting time.
        """
        scale = self.costs.scale
        if scale is None:
            return [0.0] * length
        each, stands = self.costs.each / self._worth(scale), max(self.acceptance, MIN_ACCEPTANCE)
        return self._said((each + self._row_chance(scale, length)) / stands, length)

    def _row_chance(self, scale: float, length: int) -> float:
        """The minimum probability of being reached that pays for a row of a draft of this length. It is the
        same for all rows: single measured costs are too uncertain to distinguish rows.
        """
        least = min(length, 2)
        more = self.costs.of_pass(1 + length) - self.costs.of_pass(least)
        return max(0.0, more) / ((1 + length - least) * self._worth(scale))

    def _said(self, chance: float, length: int) -> list[float]:
        """The drafter's probabilities that correspond to this probability of being reached, for each draft
        token.
        """
        return [min(1.0, chance) ** (1 / self._trust)] * length

    def _worth(self, scale: float) -> float:
        """Seconds per token at the current rate."""
        return scale / max(self._earned_rate, 1.0)

    def _rates(self, most: int) -> Sequence[float]:
        """Tokens per second with drafts of 0, 1, … `most` tokens."""
        costs = self.costs
        rates, tokens, reached = [], 0.0, 1.0
        for length in range(most + 1):
            tokens += reached
            reached *= self.acceptance
            rates.append(tokens / (costs.of_pass(1 + length) + costs.of_draft(length)))
        return rates
