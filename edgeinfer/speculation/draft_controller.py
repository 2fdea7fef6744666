"""Chooses draft lengths: the one with the most expected tokens per second, checked by what drafting gains.

With acceptance a_i of the i-th draft token, t(n) seconds for a forward of n tokens and b + k·d for a draft, k
draft tokens give 1 + a_1 + a_1·a_2 + … tokens in t(k + 1) + b + k·d seconds. Until drafting is measured to
help, drafts are probes that cost at most PROBE_SHARE of decode time; then drafting pauses for
`cooldown_tokens`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from edgeinfer.speculation.draft_costs import BASELINE_EVERY, MAX_DRAFTED, DraftCosts

PROBE_SHARE, MAX_DEFICIT = 0.01, 2.0
"""Probe budget per token, and the deficit of a series of probes that are predicted to pay; in tokens of
baseline decoding."""
MEMORY = 0.95
"""Weight of the acceptance so far after one more draft token."""
LEVEL_MEMORY, LEVEL_PRIOR = 0.99, 20.0
"""The same of a level's share of the acceptance, and how many tokens the level before it counts for."""
SHORT_GAIN = 1.02
"""Predicted speed of drafts of the short vocabulary, relative to others, from which it is used."""


@dataclass(frozen=True)
class DraftStats:
    """Draft statistics, for a later process: `tokens` of the last steps with drafts, and their `cost` in
    tokens of baseline decoding.
    """

    acceptance: float
    trust: float
    tokens: float
    cost: float
    probe_budget: float


class Acceptance:
    """How often draft tokens are accepted, given that those before them are: of a text, which changes soon,
    times what is typical of each level of a draft. A draft head's further tokens are right less often.
    """

    def __init__(self, accepted: float = 1.5, verified: float = 2.0) -> None:
        self._accepted, self._verified = accepted, verified
        """Of tokens that could be drafted."""
        self._right = [0.0] * MAX_DRAFTED
        self._expected = [0.0] * MAX_DRAFTED
        """By level: the accepted tokens, and how many were expected."""

    @property
    def rate(self) -> float:
        return self._accepted / self._verified

    def begin(self, rate: float) -> None:
        """Start from a stored rate."""
        self._accepted, self._verified = 3 * rate, 3.0

    def record(self, level: int, *, accepted: bool) -> None:
        """Record a verified token."""
        level = min(level, MAX_DRAFTED - 1)
        self._right[level] = LEVEL_MEMORY * self._right[level] + accepted
        self._expected[level] = LEVEL_MEMORY * self._expected[level] + self.rate
        self._accepted = MEMORY * self._accepted + accepted
        self._verified = MEMORY * self._verified + 1

    @property
    def shares(self) -> list[float]:
        """The acceptance of each level, relative to `rate`."""
        shares, before = list[float](), 1.0
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
        self.probe_budget = 0.0
        self._accepted = Acceptance()
        self._coverage = 1.0
        """The share of tokens that are in the short vocabulary."""
        self._trust = 1.0
        """Exponent of the drafter's probabilities that makes them match the acceptance."""
        self._tokens = self._cost = 0.0
        self._is_cold = self._is_first = True

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
        return self._tokens > self._cost

    @property
    def stats(self) -> DraftStats:
        """The statistics for another completion."""
        budget = self.probe_budget - PROBE_SHARE * self.cooldown_tokens
        return DraftStats(self._accepted.rate, self._trust, self._tokens, self._cost, budget)

    def begin(self, stats: DraftStats) -> None:
        """Start from stored statistics."""
        self._accepted.begin(stats.acceptance)
        self._tokens, self._cost = stats.tokens, stats.cost
        self._trust, self.probe_budget = stats.trust, stats.probe_budget

    def record_baseline(self, seconds: float, texts: int = 1) -> None:
        """Record a forward of one token of each text, without a draft."""
        self.probe_budget = min(1.0, self.probe_budget + PROBE_SHARE)
        self.costs.record_baseline(seconds / self.costs.relative(texts))

    def record_step(
        self, tokens: float, rows: int, drafted: int, draft: float, forward: float, texts: int = 1
    ) -> None:
        """Record a step of `tokens` resulting tokens of some texts: `drafted` tokens in `draft` seconds, and
        a forward of `rows` tokens in `forward` seconds.
        """
        spent, cost = self.costs.record_step(rows, drafted, draft, forward)
        if not cost:
            return
        share = self.costs.relative(texts)
        tokens, spent, cost = tokens / texts, spent / share, cost / share
        # Missed tokens that the drafter has to prefill serve later drafts too, if there are any.
        paid = cost if self.is_profitable or self._is_first else spent
        self.probe_budget = min(1.0, self.probe_budget + PROBE_SHARE + tokens - paid)
        if not self._is_cold:  # after a pause, other work has evicted the drafter's data from the caches
            self._tokens, self._cost = 0.9 * self._tokens + tokens, 0.9 * self._cost + cost
        self._is_cold = self._is_first = False

    def record_accepted(
        self, drafted: int, accepted: int, probs: Sequence[float] = (), *, missed: bool = False
    ) -> None:
        """Record the accepted number of draft tokens, and the drafter's `probs` of them, if known; tokens
        after the first rejected one don't count, nor does that one if the next token was `missed`: it isn't
        in the short vocabulary.
        """
        for index in range(min(accepted + (not missed), drafted)):
            self._accepted.record(index, accepted=index < accepted)
        for index, prob in enumerate(probs[: accepted + 1]):
            surprise = prob**self._trust - (index < accepted)
            self._trust = min(2.0, max(0.1, self._trust * math.exp(0.1 * surprise)))

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
        tokens, costs = expected_tokens(self.acceptance, self.level_shares), self.costs
        return [each / (costs.forward(1 + n) + costs.draft(n)) for n, each in enumerate(tokens)]

    def length(self, limit: int) -> int:
        """Number of tokens to draft now, at most `limit`; 0: none."""
        if limit < 1 or self.costs.baselines_due:
            return 0
        rates = self._rates()[: limit + 1]
        return self._longest(rates.index(max(rates)))

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
        best = max(range(longest + 1), key=lambda length: self._rate(lengths[length], tokens))
        return _within(self._longest(best), limits, acceptances, rows)

    def _rate(self, lengths: Sequence[int], tokens: Sequence[Sequence[float]]) -> float:
        """Expected tokens per second with drafts of these lengths; `tokens`: of each text, by the length."""
        made = sum(each[length] for each, length in zip(tokens, lengths, strict=True))
        forward = self.costs.forward(len(lengths) + sum(lengths))
        return made / (forward + self.costs.draft(max(lengths)))

    def _longest(self, best: int) -> int:
        """The draft length where `best` is predicted to be the fastest: a probe, if drafting isn't measured
        to pay, and 0 if there is no budget for it.
        """
        if best and self.is_profitable:
            return best
        promises = best > 0 and not self._is_cold
        if self.probe_budget <= (-MAX_DEFICIT if promises else 0.0):
            self._pause()
            return 0
        return best if promises else 1

    def _pause(self) -> None:
        """Pause drafting until the probe budget has recovered."""
        self.cooldown_tokens = max(1, math.ceil(-self.probe_budget / PROBE_SHARE))
        self.probe_budget, self._is_cold = self.probe_budget + PROBE_SHARE * self.cooldown_tokens, True
        if self.cooldown_tokens >= BASELINE_EVERY:
            self.costs.time_baseline()

    def min_probs(self, length: int, texts: int = 1) -> tuple[float, float]:
        """Minimum probabilities of being reached that pay for verifying a draft token, and for drafting
        another one after it; of drafts for several texts.
        """
        gain = max(1.0, self._tokens / self._cost if self._cost else 1.0)
        rate = gain * texts / self.costs.relative(texts)
        row = self.costs.row(length, texts) * rate
        further = (self.costs.token / texts * rate + row) / max(self.acceptance, 0.1)
        return min(1.0, row) ** (1 / self._trust), min(1.0, further) ** (1 / self._trust)


def _within(longest: int, limits: Sequence[int], acceptances: Sequence[float], rows: int) -> list[int]:
    """Draft lengths of at most `longest` within `limits` and `rows`: the tokens that are least likely to be
    reached are left out.
    """
    lengths = [max(0, min(longest, limit)) for limit in limits]
    while len(lengths) + sum(lengths) > rows:
        reached = {at: acceptances[at] ** length for at, length in enumerate(lengths) if length}
        lengths[min(reached, key=reached.__getitem__)] -= 1
    return lengths
