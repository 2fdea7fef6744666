"""The expert cache policy: which experts get the GPU slots of their layer, by recency and frequency.

The host counts the experts that tokens select. An expert's *rate* is the expected number of selections per
token: a weighted sum of a slow mean (frequency) and a fast mean (recency). An expert replaces another only if
the difference of their rates is significant, and if the expected saving exceeds the cost of the copy. This
prevents two experts from alternating in a slot. While nothing changes, checks become rarer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ExpertUsage:
    """Parameters of `ExpertCachePolicy`. Half-lives are in tokens; tuned on recorded traces, see
    docs/user/plan.md.
    """

    slow_half_life: float = 512.0
    fast_half_life: float = 32.0
    fast_share: float = 0.6
    """Weight of the fast mean in the rate."""
    horizon: float = 256.0
    """Number of tokens for which hot experts are expected to remain hot."""
    cost: float = 16.0
    """Cost of a copy, in CPU reads of an expert: its launch takes the host half a millisecond on a server."""
    certainty: float = 5.0
    """Minimum difference of two rates in standard deviations of chance, in the slow mean or in the weighted
    sum: the best and the worst of many experts differ by chance alone."""
    check_interval: int = 16
    """Tokens until the next check, after a check that found a swap."""
    max_check_interval: int = 64
    """Maximum tokens until the next check: each check without a swap doubles the interval."""
    at_once: int = 16
    """Maximum number of swaps per check."""
    a_layer: int = 4
    """Maximum number of these swaps in one layer."""


class Swap(NamedTuple):
    """In `layer` (a row), `expert` replaces `evicted` in its slot. `gain`: CPU reads of an expert saved over
    the horizon, less the copy.
    """

    layer: int
    expert: int
    slot: int
    evicted: int
    gain: float


class ExpertCachePolicy:
    """The slots of some layers with `count` experts each, of which a token uses `experts_per_token`.
    `residents[layer][slot]` is the expert initially in each slot.

    `slots` (layers, count) int64: the slot of each expert, -1 for none. A swap has two steps, so that a slot
    isn't read while it is written: `begin` removes the old expert, `finish_swap` assigns the new one.
    """

    def __init__(
        self,
        count: int,
        experts_per_token: int,
        residents: Sequence[Sequence[int]],
        usage: ExpertUsage | None = None,
    ) -> None:
        self.usage, self._experts_per_token = usage or ExpertUsage(), experts_per_token
        self.check_interval = self.usage.check_interval
        shape = len(residents), count
        self.slots: Ints = np.full(shape, -1, np.int64)
        for row, experts in zip(self.slots, residents, strict=True):
            row[list(experts)] = np.arange(len(experts))
        self._pending_mask = np.zeros(shape, np.bool_)
        self._slow, self._fast = (
            _Mean(shape, self.usage.slow_half_life),
            _Mean(shape, self.usage.fast_half_life),
        )

    def record(self, requests: Ints) -> None:
        """Add the counts `requests` (layers, count): selections of each expert since the last call."""
        tokens = float(requests.sum(axis=1).mean()) / self._experts_per_token
        self._slow.add(requests, tokens)
        self._fast.add(requests, tokens)

    @property
    def rates(self) -> Floats:
        """(layers, count): expected selections of each expert per token; zeros before the first token."""
        share = self.usage.fast_share
        return (1 - share) * self._slow.rates + share * self._fast.rates

    def proposals(self) -> list[Swap]:
        """Profitable swaps, largest gain first; they share no expert and no slot. Empty: none is profitable,
        or there are too few observations.
        """
        swaps = self._proposals() if self._slow.tokens else []
        self.check_interval = (
            self.usage.check_interval
            if swaps
            else min(2 * self.check_interval, self.usage.max_check_interval)
        )
        return swaps

    def _proposals(self) -> list[Swap]:
        usage, rates, rows = self.usage, self.rates, np.arange(len(self.slots))[:, None]
        resident = self.slots >= 0
        best = _lowest(np.where(resident | self._pending_mask, np.inf, -rates), usage.a_layer)
        worst = _lowest(np.where(resident, rates, np.inf), usage.a_layer)
        sure = self._certainty(rows, best, worst) >= usage.certainty
        difference = rates[rows, best] - rates[rows, worst]
        gain = np.where(sure, difference * min(self._slow.tokens, usage.horizon) - usage.cost, 0.0)
        gain[(resident | self._pending_mask)[rows, best] | ~resident[rows, worst]] = 0.0
        swaps = []
        for flat in np.argsort(-gain, axis=None)[: usage.at_once]:
            row, token = np.unravel_index(flat, gain.shape)
            if gain[row, token] <= 0:
                break
            expert, evicted = int(best[row, token]), int(worst[row, token])
            swaps.append(
                Swap(int(row), expert, int(self.slots[row, evicted]), evicted, float(gain[row, token]))
            )
        return swaps

    def _certainty(self, rows: Ints, best: Ints, worst: Ints) -> Floats:
        """The difference of the rates of `best` and `worst` in standard deviations of chance. The larger of
        two: in the slow mean, which shows small lasting differences, and in the weighted sum, which shows
        changes early.
        """
        share = self.usage.fast_share
        both = (1 - share) ** 2 * self._slow.spread + share**2 * self._fast.spread
        deviations = np.zeros(best.shape)
        for rates, spread in ((self._slow.rates, self._slow.spread), (self.rates, both)):
            high, low = rates[rows, best], rates[rows, worst]
            deviations = np.maximum(
                deviations, (high - low) / np.sqrt(np.maximum((high + low) * spread, 1e-12))
            )
        return deviations

    def begin(self, swap: Swap) -> None:
        """Mark the slot as about to be written."""
        self.slots[swap.layer, swap.evicted] = -1
        self._pending_mask[swap.layer, swap.expert] = True

    def finish_swap(self, swap: Swap) -> None:
        """Mark the slot as holding the new expert."""
        self._pending_mask[swap.layer, swap.expert] = False
        self.slots[swap.layer, swap.expert] = swap.slot


def _lowest(values: Floats, count: int) -> Ints:
    """(rows, count): the indices of each row's lowest values, in rising order of value."""
    return np.argsort(values, axis=1, kind="stable")[:, :count]


class _Mean:
    """An exponential mean of the selections of each expert per token; the weight halves every half-life."""

    def __init__(self, shape: tuple[int, int], half_life: float) -> None:
        self._half_life = half_life
        self._sums: Floats = np.zeros(shape)
        self.tokens = self._sum_squares = 0.0

    def add(self, requests: Ints, tokens: float) -> None:
        decay = 0.5 ** (tokens / self._half_life)
        self._sums = decay * self._sums + requests
        self.tokens = decay * self.tokens + tokens
        self._sum_squares = decay * decay * self._sum_squares + tokens

    @property
    def rates(self) -> Floats:
        return self._sums / max(self.tokens, 1e-9)

    @property
    def spread(self) -> float:
        """The variance of a rate due to chance if tokens select independently, for a rate of 1."""
        return self._sum_squares / max(self.tokens, 1e-9) ** 2


@dataclass(frozen=True)
class CacheSimulation:
    """Result of a simulated expert cache on a recorded trace: requests, hits, and copies made."""

    requested: int
    hits: int
    copies: int

    @property
    def hit_rate(self) -> float:
        return self.hits / self.requested if self.requested else 0.0


def simulate(
    trace: Ints, slots: ExpertCachePolicy, *, tokens_per_copy: int = 4, swapping: bool = True
) -> CacheSimulation:
    """Simulate the expert cache on a `trace` (layers, tokens, used) of the experts that each token selected.

    `tokens_per_copy`: tokens from the decision for a copy until its expert is usable; one copy at a time.
    """
    layers, tokens, _ = trace.shape
    count = slots.slots.shape[1]
    rows = np.arange(layers)[:, None]
    hits = copies = 0
    requests, looked = np.zeros((layers, count), np.int64), 0
    queued: list[Swap] = []
    under_way: tuple[int, Swap] | None = None
    for token in range(tokens):
        if under_way and token >= under_way[0]:
            slots.finish_swap(under_way[1])
            under_way = None
        if queued and under_way is None:
            under_way = token + tokens_per_copy, queued.pop(0)
            slots.begin(under_way[1])
            copies += 1
        hits += int((slots.slots[rows, trace[:, token]] >= 0).sum())
        np.add.at(requests, (rows, trace[:, token]), 1)
        if swapping and under_way is None and token + 1 - looked >= slots.check_interval:
            slots.record(requests)
            requests[:], looked = 0, token + 1
            queued = slots.proposals()
    return CacheSimulation(trace.size, hits, copies)
