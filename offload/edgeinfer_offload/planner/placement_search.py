"""Searching for the placement that answers fastest within a budget.

A token goes up the layers once and changes sides where neighbours lie apart; what a layer costs depends on
the side on which the activations reach it. For a *price* of GPU memory (seconds for a byte) the best
placement of all layers is therefore found exactly, layer by layer (dynamic programming over the two sides).
Prices from high to nothing give placements from few bytes to many, each the fastest for its bytes; between
two neighbours, and along a few plain orders (whole layers; attention before feed-forwards), layers change
over one by one, the one at the limit in the part that fits best.

No candidate depends on the budget, which only forbids some: more memory is never predicted to be slower.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import isfinite
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgeinfer_offload.machine.hardware import OVERLAP_LOSS
from edgeinfer_offload.planner.layer_costs import Array, LayerCosts

CPU, GPU = 0, 1
SIDES = (CPU, GPU)
DEEPEST_BISECTION = 5
SMALLEST_GAP_BYTES = 32 << 20
"""Neighbours closer than this aren't bisected further: layers change over one by one between them anyway."""


class Choice(NamedTuple):
    """Where one layer's parts lie; `units` of its feed-forward are on the GPU."""

    attention: int
    cache: int
    units: int


class Part(NamedTuple):
    """What one choice takes and leaves; `seconds` by the side on which the activations reach it."""

    seconds: tuple[float, float]
    gpu_bytes: float
    cpu_bytes: float
    out: int


PAIRS = ((CPU, CPU), (GPU, GPU))
"""Sides of attention and cache, in the order of the tables' rows: keys and values lie where they are read."""


class LayerTable:
    """Seconds and bytes of every choice of one layer, (pair, units); infinite where it can't be had.

    `seconds[side]`: with the activations coming from that side. `out`: the side on which it leaves them.
    """

    def __init__(self, costs: LayerCosts, hand_over: float, attend: bool = False) -> None:
        """`attend`: attention has to be on the GPU."""
        shape = len(PAIRS), costs.units + 1
        self.gpu_bytes, self.cpu_bytes = np.zeros(shape), np.zeros(shape)
        self.out = np.zeros(shape, np.int64)
        own = np.full(shape, np.inf)
        for row, (attention, cache) in enumerate(PAIRS):
            placed = costs.attention[attention], costs.cache[cache]
            if placed[0] is None or placed[1] is None or (attention == GPU and not costs.gpu_can_attend):
                continue
            block, out = _feed_forward(costs, attention, hand_over)
            always = costs.always[attention] if costs.always else None
            fixed = [(attention, placed[0]), (cache, placed[1])]
            fixed += [(attention, always)] if always else []
            self.cpu_bytes[row] = costs.cpu_bytes + sum(c.nbytes for side, c in fixed if side == CPU)
            self.gpu_bytes[row] = costs.gpu_bytes + sum(c.nbytes for side, c in fixed if side == GPU)
            own[row] = block + placed[0].seconds + placed[1].seconds
            if attention == CPU:  # what has its attention here is here
                own[row, 0 if attend else 1 :] = np.inf
            self.out[row] = out
        self._parts: dict[Choice, Part] = {}
        half = hand_over / 2
        crossing = [[half if pair[0] != side else 0.0] for side in SIDES for pair in PAIRS]
        self.seconds = (
            own + np.array(crossing[: len(PAIRS)]),
            own + np.array(crossing[len(PAIRS) :]),
        )

    def index(self, choice: Choice) -> tuple[int, int]:
        return PAIRS.index((choice.attention, choice.cache)), choice.units

    def part(self, choice: Choice) -> Part:
        """That of a choice; a search asks for the same ones again and again."""
        found = self._parts.get(choice)
        if found is None:
            at = self.index(choice)
            seconds = float(self.seconds[CPU][at]), float(self.seconds[GPU][at])
            found = Part(seconds, float(self.gpu_bytes[at]), float(self.cpu_bytes[at]), int(self.out[at]))
            self._parts[choice] = found
        return found

    def choice(self, flat: int) -> Choice:
        row, units = divmod(flat, self.out.shape[1])
        return Choice(*PAIRS[row], units)

    def best(self, price: float) -> dict[tuple[int, int], tuple[float, int]]:
        """(side in, side out) -> the least of seconds + price · GPU bytes, and the choice that has it."""
        found = {}
        for side in SIDES:
            score = self.seconds[side] + price * self.gpu_bytes
            for out in SIDES:
                flat = int(np.argmin(np.where(self.out == out, score, np.inf)))
                found[side, out] = float(score.flat[flat]), flat
                if self.out.flat[flat] != out:
                    found[side, out] = np.inf, flat
        return found


def _feed_forward(costs: LayerCosts, side: int, hand_over: float) -> tuple[Array, npt.NDArray[np.int64]]:
    """Seconds of the feed-forward behind an attention on `side`, for every number of units on the GPU, and
    the side where the sum ends up.

    Both halves run at once: the slower counts, what of the other isn't hidden, and one hand-over. A
    mixture's router comes before both; it, and the experts of its own side, are where the attention is. A
    dense feed-forward that lies wholly on the other side takes the activations there for good.
    """
    units = np.arange(costs.units + 1)
    own, other = (
        (costs.gpu_seconds, costs.cpu_seconds) if side == GPU else (costs.cpu_seconds, costs.gpu_seconds)
    )
    elsewhere = units < costs.units if side == GPU else units > 0
    if costs.is_mixture:
        always = costs.always[side] if costs.always else None
        begin = always.seconds if always else 0.0
        if costs.units == 0 and side == GPU:  # no expert can be on the GPU
            elsewhere = np.array([True])
        return begin + _at_once(own, other) + hand_over * elsewhere, np.full(len(units), side)
    seconds = _at_once(own, other) + hand_over * elsewhere
    out = np.full(len(units), side)
    whole = 0 if side == GPU else costs.units
    if side == GPU or costs.units:
        seconds[whole] = other[whole] + hand_over / 2
        out[whole] = 1 - side
    return seconds, out


def _at_once(own: Array, other: Array) -> Array:
    """Seconds of two halves that run at once: the longer, and what of the shorter isn't saved."""
    return np.maximum(own, other) + OVERLAP_LOSS * np.minimum(own, other)


@dataclass(frozen=True)
class NonLayerPlacement:
    """What lies outside the layers: where a token begins and ends, what that takes and costs."""

    start: int
    head: int
    embedding: int
    draft: int | None
    seconds: float
    gpu_bytes: float
    cpu_bytes: float


@dataclass(frozen=True)
class Placement:
    """A candidate: its layers' choices and its ends; `seconds` of a token, those for the disk included."""

    choices: tuple[Choice, ...]
    ends: NonLayerPlacement
    seconds: float
    gpu_bytes: float
    cpu_bytes: float

    @property
    def uses_gpu(self) -> bool:
        return self.ends.gpu_bytes > 0 or any(choice != Choice(CPU, CPU, 0) for choice in self.choices)


@dataclass(frozen=True)
class Budget:
    """What may be taken. `gpu_fixed`: what any use of the GPU takes beside the items; `cpu_fixed` likewise.

    `spill_seconds`: what a byte that main memory can't hold costs a token; infinite: it must hold all.
    """

    gpu_bytes: float
    cpu_bytes: float
    gpu_fixed: float
    cpu_fixed: float
    spill_seconds: float

    def penalty(self, cpu_bytes: Array | float) -> Array:
        """Seconds that a token waits for the disk."""
        missing = np.maximum(np.asarray(cpu_bytes) + self.cpu_fixed - self.cpu_bytes, 0.0)
        with np.errstate(invalid="ignore"):
            return np.where(missing > 0, missing * self.spill_seconds, 0.0)


class Search:
    """All candidates of one model on one machine; `best` picks by budget. `attend`: only those with all
    attention on the GPU, where that can be.
    """

    def __init__(
        self,
        costs: Sequence[LayerCosts],
        ends: Sequence[NonLayerPlacement],
        hand_over: float,
        attend: bool = False,
    ) -> None:
        self._attend = attend
        self._tables = _shared_tables(costs, hand_over, attend)
        self._ends = ends
        self._hand_over = hand_over

    def best(self, budget: Budget) -> Placement | None:
        """The fastest placement that uses the GPU within the budget; None: there is none."""
        best, room = None, budget.gpu_bytes - budget.gpu_fixed
        for ends in self._ends:
            for begin, end in self._paths[ends]:
                for order in (range(len(self._tables) - 1, -1, -1), range(len(self._tables))):
                    best = self._along(begin, end, order, ends, budget, room, best)
        return best

    def placement(self, choices: Sequence[Choice], ends: NonLayerPlacement) -> Placement:
        """A placement with its cost, as the search counts it."""
        seconds, gpu_bytes, cpu_bytes, side = ends.seconds, ends.gpu_bytes, ends.cpu_bytes, ends.start
        for table, choice in zip(self._tables, choices, strict=True):
            taken, on_gpu, on_cpu, out = table.part(choice)
            seconds += taken[side]
            gpu_bytes += on_gpu
            cpu_bytes += on_cpu
            side = out
        seconds += self._hand_over / 2 if side != ends.head else 0.0
        return Placement(tuple(choices), ends, float(seconds), float(gpu_bytes), float(cpu_bytes))

    @cached_property
    def _paths(self) -> dict[NonLayerPlacement, list[tuple[tuple[Choice, ...], tuple[Choice, ...]]]]:
        """For each kind of ends the pairs of placements between which layers change over one by one."""
        nothing = tuple(Choice(CPU, CPU, 0) for _ in self._tables)
        attention = tuple(self._least(table, GPU, 0) for table in self._tables)
        everything = tuple(self._least(table, GPU, table.out.shape[1] - 1) for table in self._tables)
        plain = [(attention, everything)]
        if not self._attend:
            plain += [(nothing, everything), (nothing, attention)]
        found = {}
        for ends in self._ends:
            frontier = self._frontier(ends)
            found[ends] = [*plain, *pairwise(frontier)]
        return found

    @staticmethod
    def _least(table: LayerTable, side: int, units: int) -> Choice:
        """Attention and cache on that side where that can be, and so many units."""
        choice = Choice(side, side, units)
        possible = isfinite(table.part(choice).seconds[CPU])
        return choice if possible else Choice(CPU, CPU, 0)

    def _frontier(self, ends: NonLayerPlacement) -> list[tuple[Choice, ...]]:
        """Placements that are the fastest for their bytes, from few bytes to many."""
        least, most = self._at_price(1.0, ends), self._at_price(0.0, ends)
        return [least.choices, *(p.choices for p in self._between(least, most, 0)), most.choices]

    def _between(self, small: Placement, large: Placement, depth: int) -> Iterator[Placement]:
        gap = large.gpu_bytes - small.gpu_bytes
        if depth == DEEPEST_BISECTION or gap < SMALLEST_GAP_BYTES:
            return
        middle = self._at_price(max(small.seconds - large.seconds, 0.0) / gap, ends=small.ends)
        if not small.gpu_bytes < middle.gpu_bytes < large.gpu_bytes:
            return
        yield from self._between(small, middle, depth + 1)
        yield middle
        yield from self._between(middle, large, depth + 1)

    def _at_price(self, price: float, ends: NonLayerPlacement) -> Placement:
        """The placement with the least seconds + price · GPU bytes."""
        scores = {side: (0.0 if side == ends.start else np.inf) for side in SIDES}
        came: list[dict[int, tuple[int, int]]] = []
        priced: dict[int, dict[tuple[int, int], tuple[float, int]]] = {}
        for table in self._tables:
            best = priced.setdefault(id(table), {}) or table.best(price)
            priced[id(table)] = best
            step, back = {}, {}
            for out in SIDES:
                sums = [scores[side] + best[side, out][0] for side in SIDES]
                side = int(np.argmin(sums))
                step[out], back[out] = sums[side], (side, best[side, out][1])
            scores = step
            came.append(back)
        side = min(SIDES, key=lambda out: scores[out] + (self._hand_over / 2 if out != ends.head else 0.0))
        choices = []
        for table, back in zip(reversed(self._tables), reversed(came), strict=True):
            side, flat = back[side]
            choices.append(table.choice(flat))
        return self.placement(choices[::-1], ends)

    def _along(
        self,
        begin: Sequence[Choice],
        end: Sequence[Choice],
        order: Sequence[int],
        ends: NonLayerPlacement,
        budget: Budget,
        room: float,
        best: Placement | None,
    ) -> Placement | None:
        """The best of `best` and the placements from `begin` to `end` that fit: layers change in `order`, and
        the one whose turn it is takes whatever choice is best.
        """
        choices, found = list(begin), best
        for layer in order:
            if begin[layer] == end[layer]:
                continue
            rest, table = self.placement(choices, ends), self._tables[layer]
            own = table.part(choices[layer])
            others_gpu, others_cpu = rest.gpu_bytes - own.gpu_bytes, rest.cpu_bytes - own.cpu_bytes
            side = ends.start if layer == 0 else self._out(layer - 1, choices[layer - 1])
            after = self._after(layer, choices, ends)
            others = rest.seconds - own.seconds[side] - after[own.out]
            every = others + table.seconds[side] + after[table.out]
            every = every + budget.penalty(others_cpu + table.cpu_bytes)
            every = np.where(others_gpu + table.gpu_bytes <= room, every, np.inf)
            if ends.head == GPU and all(
                c.attention == CPU for c in (*choices[:layer], *choices[layer + 1 :])
            ):
                every[PAIRS.index((CPU, CPU))] = np.inf  # nothing hands over to a head alone
            if not np.isfinite(every).any():
                choices[layer] = end[layer]
                continue
            flat = int(np.argmin(every))
            if every.flat[flat] < (found.seconds if found else np.inf):
                changed = [*choices[:layer], table.choice(flat), *choices[layer + 1 :]]
                found = replace(self.placement(changed, ends), seconds=float(every.flat[flat]))
            choices[layer] = end[layer]
        return found

    def _out(self, layer: int, choice: Choice) -> int:
        return self._tables[layer].part(choice).out

    def _after(self, layer: int, choices: Sequence[Choice], ends: NonLayerPlacement) -> Array:
        """Seconds of what follows the layer directly, by the side on which the layer leaves off."""
        if layer + 1 == len(choices):
            return np.array([self._hand_over / 2 if side != ends.head else 0.0 for side in SIDES])
        return np.array(self._tables[layer + 1].part(choices[layer + 1]).seconds)


def _shared_tables(costs: Sequence[LayerCosts], hand_over: float, attend: bool) -> list[LayerTable]:
    """A table for every layer; layers with the same costs share theirs."""
    tables: dict[int, LayerTable] = {}
    for layer in costs:
        if id(layer) not in tables:
            tables[id(layer)] = LayerTable(layer, hand_over, attend)
    return [tables[id(layer)] for layer in costs]
