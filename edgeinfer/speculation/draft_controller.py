"""How many tokens to draft: what a pass of n tokens costs, and how often guesses stand, as seen so far.

With acceptance a, pass cost t(n) and draft cost b + k·d, a draft of k tokens gives (1 - a^(k+1)) / (1 - a)
tokens in t(k + 1) + b + k·d seconds; the k with the most tokens a second is taken, 0 included.

That is a promise: guesses are made while the drafter is sure enough, so that those that are judged stand more
often than any would, and a draft that comes to nothing costs too. So what drafting has really earned is kept
as well: it decides how sure a guess must be, and as long as it isn't more than plain decoding gives, drafts
are trials, short ones, that live on a small allowance. Once that is spent there is nothing to ask for some
tokens: a `rest`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from edgeinfer.speculation.draft_costs import COLD, DISTURBED, MAX_DRAFTED, PLAIN_EVERY, RunningCosts

FIRST_GUESS, FIRST_WEIGHT = 0.75, 2.0
"""Acceptance that is assumed before anything has been seen, and how many guesses that counts for."""
MIN_ACCEPTANCE = 0.1
ACCEPTANCE_MEMORY = 0.95
"""Weight of the guesses before when one more has been judged."""
MIN_TRUST, MAX_TRUST, TRUST_STEP = 0.1, 2.0, 0.1
"""Bounds of the power to which a drafter's word is raised, and by what share a surprise changes it."""
GAIN = 1.05
"""A draft has to promise, and drafts have to earn, so much more tokens a second than none."""
EARNED_MEMORY = 0.9
"""Weight of the steps before in what drafting earns, when there is one more."""
EVIDENCE = 3
"""Steps with drafts, or with looking for them, after which what they earned is believed."""
TRIALS = 4
"""So many drafts are tried in a row if they promise to pay; others while each gives more than it takes."""
FIRST_LENGTH = 2
"""Most tokens of the first of some drafts that are tried in a row, and of those that promise nothing."""
ALLOWANCE = 0.01
"""What trials may cost, in tokens of plain decoding a pass; what they gain is theirs too."""
FIRST_PURSE, FULL_PURSE = 0.25, 1.0
"""Tokens that trials may cost at once: in the beginning, and when much has been saved."""
MIN_REST = 8
"""Tokens: to ask costs a small model some hundredths of one."""


@dataclass(frozen=True)
class DraftStats:
    """What drafts have come to, to go on from another time."""

    acceptance: float
    trust: float
    tokens: float
    """Of the last steps with drafts."""
    cost: float
    """Of these steps, in tokens of plain decoding."""
    steps: float
    purse: float


class DraftController:
    """Costs and chances of one model and its drafter in answers of one kind; kept from answer to answer."""

    def __init__(self) -> None:
        self.costs = RunningCosts()
        self._stood, self._judged = FIRST_GUESS * FIRST_WEIGHT, FIRST_WEIGHT
        self._earned_tokens = self._earned_cost = 0.0
        self._steps = 0
        self._trust = 1.0
        """The power to which what a drafter says of its guesses is raised."""
        self._purse = FIRST_PURSE
        self._trials, self._first, self._gives = 0, False, False
        """How many drafts of a trial are to come, however little the last ones gave, if they promise to pay;
        whether this one is the first; and whether the last one gave more than it took.
        """
        self._known = False
        """Whether anything has been tried."""
        self.rest = 0
        """Tokens to come for which nobody need ask; who decodes one of them counts it down."""

    @property
    def acceptance(self) -> float:
        """The chance that a guess stands, if those before it do."""
        return self._stood / self._judged

    @property
    def learnt(self) -> DraftStats:
        """What has been seen, with the weight of EVIDENCE steps at most: another text may be another case."""
        share = min(1.0, EVIDENCE / max(1, self._steps))
        tokens, cost = share * self._earned_tokens, share * self._earned_cost
        purse = self._purse - ALLOWANCE * self.rest
        return DraftStats(self.acceptance, self._trust, tokens, cost, min(self._steps, EVIDENCE), purse)

    def begin(self, learnt: DraftStats) -> None:
        """Go on from what was seen another time."""
        self._stood, self._judged = EVIDENCE * learnt.acceptance, float(EVIDENCE)
        self._earned_tokens, self._earned_cost, self._steps = learnt.tokens, learnt.cost, int(learnt.steps)
        self._trust, self._purse, self._known = learnt.trust, learnt.purse, True

    def passed(self, seconds: float) -> None:
        """A pass of one, without a draft, took so long."""
        self._purse = min(FULL_PURSE, self._purse + ALLOWANCE)
        self.costs.passed(1, seconds)

    def stepped(self, tokens: int, rows: int, guesses: int, looked: float, read: float) -> None:
        """A step with a draft, or with looking for one, gave so many tokens: so many guesses took `looked`
        seconds, and a pass of so many rows took `read`.
        """
        costs, plain = self.costs, self.costs.plain
        costs.stepped()
        if plain is None:
            return
        usual = min(looked, DISTURBED * (costs.of_draft(guesses) or looked))
        # A pass of one is what plain decoding would have made, and no measure of it.
        due = costs.of_pass(rows) if rows > 1 else plain
        cost = (usual + (min(read, DISTURBED * due) if rows > 1 else plain)) / plain
        paid = looked / plain + (min(read, COLD * due) / plain if rows > 1 else 1.0)
        first, self._first, self._trials = self._first, False, max(0, self._trials - 1)
        if first:
            # Other work has driven from the caches what it needs: it tells what a trial costs, nothing else.
            self._gives = tokens > 1
        else:
            self._gives = tokens > cost
            self._steps += 1
            self._earned_tokens = EARNED_MEMORY * self._earned_tokens + tokens
            self._earned_cost = EARNED_MEMORY * self._earned_cost + cost
            if rows > 1:
                costs.drafted(guesses, looked)
                costs.passed(rows, read)
        # What was missed is read for all drafts to come, if there will be any.
        free = (looked - usual) / plain if self.earns or not self._known else 0.0
        self._known = True
        self._purse = min(FULL_PURSE, self._purse + ALLOWANCE + tokens - (paid - free))

    @property
    def earns(self) -> bool:
        """Whether drafts are seen to give more than plain decoding."""
        return self._steps >= EVIDENCE and self._earned_tokens > GAIN * self._earned_cost

    @property
    def _earned_rate(self) -> float:
        """Tokens in the time of a plain one by steps with drafts; 1 before there is evidence."""
        return self._earned_tokens / self._earned_cost if self._steps >= EVIDENCE else 1.0

    def judged(self, drafted: int, stood: int) -> None:
        """Of so many guesses so many stood; the rest fell with the first that didn't."""
        for index in range(min(stood + 1, drafted)):
            self._stood = ACCEPTANCE_MEMORY * self._stood + (index < stood)
            self._judged = ACCEPTANCE_MEMORY * self._judged + 1

    def heard(self, chances: Sequence[float], stood: int) -> None:
        """What a drafter thought of its guesses, of which so many stood before the first that fell.

        A guess that its drafter is unsure of, as the model may be too, stands more often than it says: what
        it says is raised to a power that is learnt, so that on average as much is expected as comes.
        """
        trust = self._trust
        for place, chance in enumerate(chances[: stood + 1]):
            surprise = chance**trust - (place < stood)
            trust = min(MAX_TRUST, max(MIN_TRUST, trust * math.exp(TRUST_STEP * surprise)))
        self._trust = trust

    def length(self, most: int) -> int:
        """Tokens to draft now, `most` at most; 0: none."""
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
        """Until there is something to try drafts with: that is saved now."""
        self.rest = max(MIN_REST, math.ceil(-self._purse / ALLOWANCE))
        self._purse += ALLOWANCE * self.rest
        if self.rest >= PLAIN_EVERY:
            self.costs.time_plain()

    def least_chances(self, length: int) -> list[float]:
        """For each token of a draft, the chance of being reached from which it is worth its row in the pass.

        A token more is worth the time in which the way things go earns one.
        """
        scale = self.costs.scale
        return self._said(0.0 if scale is None else self._row_chance(scale, length), length)

    def further_chances(self, length: int) -> list[float]:
        """For each token of a draft, the chance of being reached from which one more is worth being guessed
        behind it: that stands with the acceptance, and takes time to guess too.
        """
        scale = self.costs.scale
        if scale is None:
            return [0.0] * length
        each, stands = self.costs.each / self._worth(scale), max(self.acceptance, MIN_ACCEPTANCE)
        return self._said((each + self._row_chance(scale, length)) / stands, length)

    def _row_chance(self, scale: float, length: int) -> float:
        """The chance of being reached that pays for a row of a draft of this length, all alike: costs that
        are measured one by one are too uncertain to tell a row from the next.
        """
        least = min(length, 2)
        more = self.costs.of_pass(1 + length) - self.costs.of_pass(least)
        return max(0.0, more) / ((1 + length - least) * self._worth(scale))

    def _said(self, chance: float, length: int) -> list[float]:
        """What a drafter must say of each of its guesses where this chance is wanted."""
        return [min(1.0, chance) ** (1 / self._trust)] * length

    def _worth(self, scale: float) -> float:
        """The seconds in which the way things go earns a token."""
        return scale / max(self._earned_rate, 1.0)

    def _rates(self, most: int) -> Sequence[float]:
        """Tokens a second with drafts of 0, 1, … `most` tokens."""
        costs = self.costs
        rates, tokens, reached = [], 0.0, 1.0
        for length in range(most + 1):
            tokens += reached
            reached *= self.acceptance
            rates.append(tokens / (costs.of_pass(1 + length) + costs.of_draft(length)))
        return rates
