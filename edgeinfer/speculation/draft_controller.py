"""Chooses draft lengths: the one with the most expected tokens per second, within what drafting may lose.

With acceptance a_i of the i-th draft token, t(n) seconds for a forward of n tokens and b + k·d for a draft, k
draft tokens give 1 + a_1 + a_1·a_2 + … tokens in t(k + 1) + b + k·d seconds. The acceptance begins as that of
published heads, with little weight. Each step with a draft adds its tokens to an account and takes its cost;
steps without drafts add PROBE_SHARE. Overdrawn, drafting pauses until the account is even.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from edgeinfer.speculation.draft_costs import BASELINE_EVERY, MAX_DRAFTED, DraftCosts

PROBE_SHARE, MAX_DEFICIT = 0.009, 2.0
"""What drafting may lose per token, and at once while it is predicted to pay; in tokens of baseline
decoding."""
PROBE_CREDIT, MAX_CREDIT = 1.0, 12.0
"""The most that the account holds for probes, and while drafting is predicted to pay: with little more than
the deficit, a few bad drafts in a row would end drafts that pay."""
STAKE = 0.3
"""The share of what may be lost that a draft of several tokens risks: short ones tell the most per loss."""
KEPT_GAIN = 0.3
"""The share of the predicted gain that a draft keeps which is made shorter for that: with a high cost of each
draft, one token may never pay.
"""
PRIOR, PRIOR_WEIGHT = 0.75, 5.0
"""The acceptance of published heads' first tokens, and how many tokens it counts for."""
MEMORY = 0.97
"""Weight of the acceptance so far after one more draft token."""
MIN_SHARE = 0.01
"""Lower probabilities, and lower accepted shares of what they promise, count as this."""
GAIN_MEMORY, GAIN_WEIGHT = 0.95, 4.0
"""Weight of the gain so far after one more draft, and the cost that counts before the first one."""
LEVEL_MEMORY, LEVEL_PRIOR = 0.99, 20.0
"""The same of a level's share of the acceptance, and how many tokens the level before it counts for."""
SHORT_GAIN = 1.02
"""Predicted speed of drafts of the short vocabulary, relative to others, from which it is used."""
RUN_SECONDS = 0.016
"""Of drafts and steps that are made in one run: a stream is as smooth, and Ctrl-C as quick, with these."""


@dataclass(frozen=True)
class DraftStats:
    """Draft statistics, for a later process. `account`: what drafting gained lately or may lose, in tokens
    of baseline decoding.
    """

    acceptance: float
    trust: float
    account: float


class RunningRatio:
    """The ratio of two sums, in which earlier terms count less each time."""

    def __init__(self, memory: float, part: float, whole: float) -> None:
        self._memory, self._part, self._whole = memory, part, whole

    def record(self, part: float, whole: float) -> None:
        """Add a term to each sum."""
        self._part = self._memory * self._part + part
        self._whole = self._memory * self._whole + whole

    @property
    def value(self) -> float:
        return self._part / self._whole


class Acceptance:
    """How often draft tokens are accepted, given that those before them are: of a text, which changes soon,
    times what is typical of each level of a draft. A draft head's further tokens are right less often.
    """

    def __init__(self, rate: float = PRIOR) -> None:
        self.begin(rate)
        self._right = [0.0] * MAX_DRAFTED
        self._expected = [0.0] * MAX_DRAFTED
        """By level: the accepted tokens, and how many were expected."""

    @property
    def rate(self) -> float:
        return self._rate.value

    def begin(self, rate: float) -> None:
        """Start from an assumed rate, of tokens that could be drafted."""
        self._rate = RunningRatio(MEMORY, PRIOR_WEIGHT * rate, PRIOR_WEIGHT)

    def record(self, level: int, *, accepted: bool) -> None:
        """Record a verified token."""
        level, rate = min(level, MAX_DRAFTED - 1), self._rate
        self._right[level] = LEVEL_MEMORY * self._right[level] + accepted
        self._expected[level] = LEVEL_MEMORY * self._expected[level] + rate.value
        rate.record(accepted, 1)

    @property
    def shares(self) -> list[float]:
        """The acceptance of each level, relative to `rate`."""
        shares, before = [], 1.0
        for right, expected in zip(self._right, self._expected, strict=True):
            before = (right + LEVEL_PRIOR * before) / (expected + LEVEL_PRIOR)
            shares.append(before)
        return shares


def expected_tokens(rate: float, shares: Sequence[float]) -> list[float]:
    """The tokens of a forward with 0, 1, 2… draft tokens, for an acceptance of `rate` and its `shares`."""
    tokens, reached = [1.0], 1.0
    for share in shares:
        reached *= min(1.0, rate * share)
        tokens.append(tokens[-1] + reached)
    return tokens


class DraftController:
    """Costs and acceptance of one model and its drafter for one kind of completion."""

    def __init__(self) -> None:
        self.costs = DraftCosts()
        self.cooldown_tokens = 0
        """Number of tokens without drafting; decoding one of them decrements it."""
        self.account = self._owed = 0.0
        """What drafting gained lately, or may lose, and what reading the missed tokens after a pause took
        besides; in tokens of baseline decoding.
        """
        self._deficit = MAX_DEFICIT
        """What drafting may lose before it pauses; nothing after a pause, until it has gained again."""
        self._accepted = Acceptance()
        self._coverage = 1.0
        """The share of tokens that are in the short vocabulary."""
        self._trust = 1.0
        """Exponent of the drafter's probabilities that makes them match the acceptance."""
        self._right = RunningRatio(MEMORY, PRIOR * PRIOR_WEIGHT, PRIOR_WEIGHT)
        """The accepted share of the draft tokens that their probabilities promise; at first that of a drafter
        that is always sure.
        """
        self._recent = RunningRatio(GAIN_MEMORY, GAIN_WEIGHT, GAIN_WEIGHT)
        """The speed of the last drafts and their forwards, relative to baseline decoding; at first 1."""
        self._is_cold = False

    @property
    def acceptance(self) -> float:
        """The probability that a draft token is accepted, given that those before it are."""
        return self._accepted.rate * (self._coverage if self.costs.is_short else 1.0)

    @property
    def level_shares(self) -> list[float]:
        """The acceptance of each level of a draft, relative to `acceptance`."""
        return self._accepted.shares

    @property
    def is_profitable(self) -> bool:
        """Whether drafting is measured to be faster than baseline decoding."""
        return self.account > PROBE_CREDIT

    @property
    def stats(self) -> DraftStats:
        """The statistics for another completion."""
        account = self.account - PROBE_SHARE * self.cooldown_tokens
        return DraftStats(self._accepted.rate, self._trust, account)

    def begin(self, stats: DraftStats) -> None:
        """Start from stored statistics."""
        self._accepted.begin(stats.acceptance)
        self._trust, self.account = stats.trust, stats.account

    def record_baseline(self, seconds: float, texts: int = 1) -> None:
        """Record a forward of one token of each text, without a draft."""
        self.account = min(MAX_CREDIT, self.account + PROBE_SHARE)
        self.costs.record_baseline(seconds / self.costs.relative(texts))

    def record_step(
        self, tokens: float, rows: int, drafted: int, draft: float, forward: float, texts: int = 1
    ) -> None:
        """Record a step of `tokens` resulting tokens of some texts: `drafted` tokens in `draft` seconds, and
        a forward of `rows` tokens in `forward` seconds.
        """
        spent, cost = self.costs.record_step(rows, drafted, draft, forward, is_cold=self._is_cold)
        if not cost:
            return
        share = self.costs.relative(texts)
        gained = tokens / texts - cost / share
        self._recent.record(tokens / texts, cost / share)
        self.account = min(MAX_CREDIT, self.account + PROBE_SHARE + gained)
        # The drafter read the tokens that it missed: no reason to end drafts, but one to pause longer.
        self._owed += (spent - cost) / share if self._is_cold else 0.0
        self._is_cold = False

    def record_accepted(
        self, drafted: int, accepted: int, probs: Sequence[float] = (), *, missed: bool = False
    ) -> None:
        """Record the accepted number of draft tokens, and the drafter's `probs` of them, if known; tokens
        after the first rejected one don't count, nor does that one if the next token was `missed`: it isn't
        in the short vocabulary.
        """
        for level in range(min(accepted + (not missed), drafted)):
            self._accepted.record(level, accepted=level < accepted)
        trust = self._trust
        for index, prob in enumerate(probs[: accepted + 1]):
            expected, is_right = prob**trust, index < accepted
            self._right.record(is_right, max(MIN_SHARE, expected))
            trust = min(2.0, max(0.1, trust * math.exp(0.1 * (expected - is_right))))
        self._trust = trust

    def record_node(self, level: int, *, accepted: bool) -> None:
        """Record whether the first candidate of a level of a tree was accepted."""
        self._accepted.record(level, accepted=accepted)

    def choose_vocabulary(self, coverage: float) -> None:
        """Use the short vocabulary if its drafts are faster. It has this share of the tokens, assumed to be
        accepted as often as all tokens.
        """
        self._coverage = coverage
        rates = [self._best_rate(is_short=is_short) for is_short in (False, True)]
        self.costs.is_short = rates[1] > SHORT_GAIN * rates[0] and self.costs.short < 1

    def _best_rate(self, *, is_short: bool) -> float:
        """Expected tokens per second with drafts of one vocabulary, or without drafts if that is faster."""
        self.costs.is_short = is_short
        return max(self._rates()) if self.costs.baseline else 0.0

    def _rates(self) -> list[float]:
        """Expected tokens per second with drafts of 0, 1, 2… tokens for one text."""
        return _rates(expected_tokens(self.acceptance, self.level_shares), self.costs.steps(MAX_DRAFTED))

    def length(self, limit: int) -> int:
        """Number of tokens to draft now, at most `limit`; 0: none."""
        if limit < 1 or self.costs.baselines_due:
            return 0
        tokens = expected_tokens(self.acceptance, self.level_shares)
        return self._affordable(tokens, self.costs.steps(min(limit, MAX_DRAFTED)))

    def cycles(self, length: int) -> int:
        """How many drafts of `length` tokens, each with a forward, take RUN_SECONDS, and lose no more than
        drafting may lose at once if no token is accepted; 0: their costs aren't known to be worth it.
        """
        if not self.is_profitable or self.costs.baselines_due:
            return 0
        seconds, baseline = self.costs.forward(1 + length) + self.costs.draft(length), self.costs.forward(1)
        loss = max(0.0, seconds / baseline - 1)
        at_most = (self.account + MAX_DEFICIT) / loss if loss else math.inf
        return int(min(RUN_SECONDS / seconds, at_most))

    def longest(self, length: int, limit: int) -> int:
        """The most tokens of a draft, at most `limit`, if the drafter ends it where no other token pays;
        `length`: the best of all drafts alike.

        A drafter that is surer than it is right doesn't end a draft in time: token i then is reached with the
        i-th power of its accepted share of what it expects.
        """
        right = min(1.0, max(MIN_SHARE, self._right.value))
        worth = min(1.0, (self.costs.row(limit) + self.costs.token) * self._recent.value)
        reached = limit if right**limit >= worth else int(math.log(worth) / math.log(right))
        return max(length, min(limit, reached))

    def lengths(self, limits: Sequence[int], acceptances: Sequence[float], rows: int) -> list[int]:
        """Number of tokens to draft now for each of several texts, whose tokens are verified by one forward:
        at most `limits`, and at most `rows` with the token before each draft.
        """
        longest = min(max(limits, default=0), MAX_DRAFTED, rows - len(limits))
        if longest < 1 or self.costs.baselines_due:
            return [0] * len(limits)
        shares = self.level_shares
        tokens = [expected_tokens(acceptance, shares) for acceptance in acceptances]
        lengths = [_within(length, limits, acceptances, rows) for length in range(longest + 1)]
        made = [sum(each[n] for each, n in zip(tokens, drafts, strict=True)) for drafts in lengths]
        rows_of = [len(drafts) + sum(drafts) for drafts in lengths]
        seconds = [self.costs.forward(n) + self.costs.draft(max(lengths[at])) for at, n in enumerate(rows_of)]
        return _within(self._affordable(made, seconds), limits, acceptances, rows)

    def _affordable(self, tokens: Sequence[float], seconds: Sequence[float]) -> int:
        """The fastest draft length that risks no more than it may; 0 to draft nothing. `tokens`, `seconds`:
        those expected of a step with drafts of 0, 1, 2… tokens.
        """
        rates = _rates(tokens, seconds)
        best = rates.index(max(rates))
        if best == 0 and self._recent.value > 1:
            best = 1
        self.account = min(self.account, MAX_CREDIT if best else PROBE_CREDIT)
        if self.is_profitable:
            self._owed, self._deficit = 0.0, MAX_DEFICIT
        if self.account <= (-self._deficit if best else 0.0):
            self._pause()
            return 0
        at_stake = STAKE * (self.account + MAX_DEFICIT)
        least = rates[0] + KEPT_GAIN * (rates[best] - rates[0])
        while best > 1 and seconds[best] / seconds[0] - 1 > at_stake and rates[best - 1] >= least:
            best -= 1
        return max(1, best)

    def _pause(self) -> None:
        """Pause drafting until the account is even."""
        self.cooldown_tokens = max(1, math.ceil((self._owed - self.account) / PROBE_SHARE))
        self.account += PROBE_SHARE * self.cooldown_tokens - self._owed
        self._owed, self._deficit, self._is_cold = 0.0, 0.0, True
        if self.cooldown_tokens >= BASELINE_EVERY:
            self.costs.time_baseline()

    def min_probs(self, length: int, texts: int = 1) -> tuple[float, float]:
        """Minimum probabilities of being reached that pay for verifying a draft token, and for drafting
        another one after it; of drafts for several texts.
        """
        rate = self._recent.value * texts / self.costs.relative(texts)
        row = self.costs.row(length, texts) * rate
        further = (self.costs.token / texts * rate + row) / max(self.acceptance, 0.1)
        return min(1.0, row) ** (1 / self._trust), min(1.0, further) ** (1 / self._trust)


def _rates(tokens: Sequence[float], seconds: Sequence[float]) -> list[float]:
    """Tokens per second of steps."""
    return [made / taken for made, taken in zip(tokens, seconds, strict=False)]


def _within(longest: int, limits: Sequence[int], acceptances: Sequence[float], rows: int) -> list[int]:
    """Draft lengths of at most `longest` within `limits` and `rows`: the tokens that are least likely to be
    reached are left out.
    """
    lengths = [max(0, min(longest, limit)) for limit in limits]
    while len(lengths) + sum(lengths) > rows:
        reached = {at: acceptances[at] ** length for at, length in enumerate(lengths) if length}
        lengths[min(reached, key=reached.__getitem__)] -= 1
    return lengths
