"""Which experts deserve the slots that their layers have in GPU memory: those chosen lately, and often.

The host counts which experts tokens choose. An expert's *rate* is how often a token is expected to choose
it: a mean that forgets slowly (frequency) and one that forgets fast (recency), weighed. An expert takes
another's slot only where the difference is more than chance, and what that is expected to save pays for the
copy: so no two take turns in a slot. Where nothing changes looks become rare.
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
    """How `ExpertCachePolicy` judges. Half-lives in tokens; measured on recorded traces, see docs/plan.md."""

    slow_half_life: float = 512.0
    fast_half_life: float = 32.0
    fast_share: float = 0.6
    """What the fast mean weighs of the two."""
    horizon: float = 256.0
    """Tokens for which what is hot now is expected to stay so."""
    cost: float = 16.0
    """What a copy costs, in times that the CPU reads an expert: launching it takes the host half a
    millisecond on a server.
    """
    certainty: float = 5.0
    """Standard deviations of what chance alone makes of two equal rates that a difference has to reach, in
    the slow mean or in both weighed: the best and the worst of many are far apart by chance.
    """
    look_after: int = 16
    """Tokens from one look to the next, if that finds something."""
    look_seldom: int = 64
    """The same where nothing was found, again and again: each time it is twice as long."""
    at_once: int = 16
    """Swaps that a look finds at most."""
    a_layer: int = 4
    """Of these in one layer."""


class Swap(NamedTuple):
    """In `layer` (a row), `expert` is to have the slot of `leaves`; `gain`: the times that the CPU needn't
    read an expert for it, over the horizon and less the copy.
    """

    layer: int
    expert: int
    slot: int
    leaves: int
    gain: float


class ExpertCachePolicy:
    """The slots of some layers with `count` experts each, of which a token uses `used`:
    `residents[layer][slot]` is whom each begins with.

    `slots` (layers, count) int64: the slot of each expert, -1 for none. A swap has two steps, so that nobody
    reads a slot while it is written: from `begin` on the old expert has none, from `land` on the new one it.
    """

    def __init__(
        self, count: int, used: int, residents: Sequence[Sequence[int]], habits: ExpertUsage | None = None
    ) -> None:
        self.habits, self._used = habits or ExpertUsage(), used
        self.look_after = self.habits.look_after
        shape = len(residents), count
        self.slots: Ints = np.full(shape, -1, np.int64)
        for row, experts in zip(self.slots, residents, strict=True):
            row[list(experts)] = np.arange(len(experts))
        self._coming = np.zeros(shape, np.bool_)
        self._slow, self._fast = (
            _Mean(shape, self.habits.slow_half_life),
            _Mean(shape, self.habits.fast_half_life),
        )

    def note(self, chosen: Ints) -> None:
        """`chosen` (layers, count): how often each expert was chosen since the last time."""
        tokens = float(chosen.sum(axis=1).mean()) / self._used
        self._slow.add(chosen, tokens)
        self._fast.add(chosen, tokens)

    @property
    def rates(self) -> Floats:
        """(layers, count): how often a token is expected to choose each expert; zeros before any was seen."""
        share = self.habits.fast_share
        return (1 - share) * self._slow.rates + share * self._fast.rates

    def proposals(self) -> list[Swap]:
        """Swaps that pay, what gains most first; none of them has an expert or a slot of another's. Nothing:
        none pays, or too little was seen to tell.
        """
        found = self._proposals() if self._slow.tokens else []
        self.look_after = (
            self.habits.look_after if found else min(2 * self.look_after, self.habits.look_seldom)
        )
        return found

    def _proposals(self) -> list[Swap]:
        habits, rates, rows = self.habits, self.rates, np.arange(len(self.slots))[:, None]
        resident = self.slots >= 0
        best = _lowest(np.where(resident | self._coming, np.inf, -rates), habits.a_layer)
        worst = _lowest(np.where(resident, rates, np.inf), habits.a_layer)
        sure = self._certainty(rows, best, worst) >= habits.certainty
        difference = rates[rows, best] - rates[rows, worst]
        gain = np.where(sure, difference * min(self._slow.tokens, habits.horizon) - habits.cost, 0.0)
        gain[(resident | self._coming)[rows, best] | ~resident[rows, worst]] = 0.0
        found = []
        for flat in np.argsort(-gain, axis=None)[: habits.at_once]:
            row, place = np.unravel_index(flat, gain.shape)
            if gain[row, place] <= 0:
                break
            expert, leaves = int(best[row, place]), int(worst[row, place])
            found.append(
                Swap(int(row), expert, int(self.slots[row, leaves]), leaves, float(gain[row, place]))
            )
        return found

    def _certainty(self, rows: Ints, best: Ints, worst: Ints) -> Floats:
        """How many standard deviations of chance lie between the rates of `best` and `worst`: in the slow
        mean, which shows small differences that last, or in both weighed, which show a change soon.
        """
        share = self.habits.fast_share
        both = (1 - share) ** 2 * self._slow.spread + share**2 * self._fast.spread
        found = np.zeros(best.shape)
        for rates, spread in ((self._slow.rates, self._slow.spread), (self.rates, both)):
            high, low = rates[rows, best], rates[rows, worst]
            found = np.maximum(found, (high - low) / np.sqrt(np.maximum((high + low) * spread, 1e-12)))
        return found

    def begin(self, swap: Swap) -> None:
        """The slot is about to be written."""
        self.slots[swap.layer, swap.leaves] = -1
        self._coming[swap.layer, swap.expert] = True

    def land(self, swap: Swap) -> None:
        """The slot holds the new expert."""
        self._coming[swap.layer, swap.expert] = False
        self.slots[swap.layer, swap.expert] = swap.slot


def _lowest(values: Floats, count: int) -> Ints:
    """(rows, count): the places of each row's lowest values, the lowest first."""
    return np.argsort(values, axis=1, kind="stable")[:, :count]


class _Mean:
    """How often a token chose each expert, what lies a half-life back counting half."""

    def __init__(self, shape: tuple[int, int], half_life: float) -> None:
        self._half_life = half_life
        self._sums: Floats = np.zeros(shape)
        self.tokens = self._squares = 0.0

    def add(self, chosen: Ints, tokens: float) -> None:
        kept = 0.5 ** (tokens / self._half_life)
        self._sums = kept * self._sums + chosen
        self.tokens = kept * self.tokens + tokens
        self._squares = kept * kept * self._squares + tokens

    @property
    def rates(self) -> Floats:
        return self._sums / max(self.tokens, 1e-9)

    @property
    def spread(self) -> float:
        """The variance of a rate, for a rate of 1, that chance makes of tokens that choose independently."""
        return self._squares / max(self.tokens, 1e-9) ** 2


@dataclass(frozen=True)
class Replayed:
    """What slots would have done for a recorded trace: experts asked for, found in one, and copies made."""

    asked: int
    hits: int
    copies: int

    @property
    def hit_rate(self) -> float:
        return self.hits / self.asked if self.asked else 0.0


def replay(
    trace: Ints, slots: ExpertCachePolicy, *, tokens_a_copy: int = 4, swapping: bool = True
) -> Replayed:
    """Go through a `trace` (layers, tokens, used), the experts that each token chose, as decoding would.

    `tokens_a_copy`: tokens from the decision for a copy until its expert can be used; one at a time.
    """
    layers, tokens, _ = trace.shape
    count = slots.slots.shape[1]
    rows = np.arange(layers)[:, None]
    hits = copies = 0
    chosen, looked = np.zeros((layers, count), np.int64), 0
    wanted: list[Swap] = []
    under_way: tuple[int, Swap] | None = None
    for place in range(tokens):
        if under_way and place >= under_way[0]:
            slots.land(under_way[1])
            under_way = None
        if wanted and under_way is None:
            under_way = place + tokens_a_copy, wanted.pop(0)
            slots.begin(under_way[1])
            copies += 1
        hits += int((slots.slots[rows, trace[:, place]] >= 0).sum())
        np.add.at(chosen, (rows, trace[:, place]), 1)
        if swapping and under_way is None and place + 1 - looked >= slots.look_after:
            slots.note(chosen)
            chosen[:], looked = 0, place + 1
            wanted = slots.proposals()
    return Replayed(trace.size, hits, copies)
