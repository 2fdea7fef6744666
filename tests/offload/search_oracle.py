"""The planner's former search, as a reference: slower, and exact for a price of memory.

For a *price* of GPU memory (seconds per byte), dynamic programming over the two devices finds the exact best
placement of all layers. Falling prices give placements with rising GPU bytes, each the fastest for its size.
Between two neighbors, and along a few simple orders (whole layers; attention before feed-forwards), layers
change one by one. The last one takes the part that fits best.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from math import isfinite
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgeinfer_offload.machine.cost_constants import OVERLAP_LOSS
from edgeinfer_offload.planner.layer_costs import Array, LayerCosts
from edgeinfer_offload.planner.placement_search import (
    CPU,
    DEVICE_INDICES,
    GPU,
    Budget,
    LayerDevices,
    NonLayerPlacement,
    Placement,
    Search,
)

DEEPEST_BISECTION = 5
SMALLEST_GAP_BYTES = 32 << 20
"""Neighbors closer than this aren't bisected further: single layers fill the gap anyway."""


class Choice(NamedTuple):
    """The placement of one layer's parts; `granules` of its feed-forward are on the GPU."""

    attention: int
    cache: int
    granules: int


class Part(NamedTuple):
    """Bytes and cost of one placement; `seconds` is indexed by the device of the input activations."""

    seconds: tuple[float, float]
    gpu_bytes: float
    cpu_bytes: float
    out: int


PAIRS = ((CPU, CPU), (GPU, GPU))
"""Devices of attention and cache, in the order of the table rows: the cache is on the device that reads it.
"""


class LayerTable:
    """Seconds and bytes of every placement of one layer, shape (pair, units); infinite if impossible.

    `seconds[side]`: with the input activations on that device. `out`: the device of the output.
    """

    def __init__(self, costs: LayerCosts, hand_over: float, attend: bool = False) -> None:
        """`attend`: attention must be on the GPU."""
        shape = len(PAIRS), costs.granules + 1
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
            if attention == CPU:  # attention on the CPU leaves the activations on the CPU
                own[row, 0 if attend else 1 :] = np.inf
            self.out[row] = out
        self._parts: dict[Choice, Part] = {}
        half = hand_over / 2
        crossing = [[half if pair[0] != side else 0.0] for side in DEVICE_INDICES for pair in PAIRS]
        self.seconds = (
            own + np.array(crossing[: len(PAIRS)]),
            own + np.array(crossing[len(PAIRS) :]),
        )

    def index(self, selection: Choice) -> tuple[int, int]:
        return PAIRS.index((selection.attention, selection.cache)), selection.granules

    def part(self, selection: Choice) -> Part:
        """The costs of a placement; cached, because the search repeats them."""
        result = self._parts.get(selection)
        if result is None:
            at = self.index(selection)
            seconds = float(self.seconds[CPU][at]), float(self.seconds[GPU][at])
            result = Part(seconds, float(self.gpu_bytes[at]), float(self.cpu_bytes[at]), int(self.out[at]))
            self._parts[selection] = result
        return result

    def choice(self, flat: int) -> Choice:
        row, granules = divmod(flat, self.out.shape[1])
        return Choice(*PAIRS[row], granules)

    def best(self, price: float) -> dict[tuple[int, int], tuple[float, int]]:
        """(device in, device out) -> the minimum of seconds + price · GPU bytes, and the placement that gives
        it.
        """
        result = {}
        for side in DEVICE_INDICES:
            score = self.seconds[side] + price * self.gpu_bytes
            for out in DEVICE_INDICES:
                flat = int(np.argmin(np.where(self.out == out, score, np.inf)))
                result[side, out] = float(score.flat[flat]), flat
                if self.out.flat[flat] != out:
                    result[side, out] = np.inf, flat
        return result


def _feed_forward(costs: LayerCosts, side: int, hand_over: float) -> tuple[Array, npt.NDArray[np.int64]]:
    """Seconds of the feed-forward after attention on device `side`, and the device of the output; both for
    every number of units on the GPU.

    Both shards overlap. The cost is the slower one, the overlap loss of the other, and one synchronization.
    An MoE router runs before both; it and the experts of its device are where the attention is. A dense
    feed-forward wholly on the other device moves the activations there permanently.
    """
    granules = np.arange(costs.granules + 1)
    own, other = (
        (costs.gpu_seconds, costs.cpu_seconds) if side == GPU else (costs.cpu_seconds, costs.gpu_seconds)
    )
    elsewhere = granules < costs.granules if side == GPU else granules > 0
    if costs.is_moe:
        always = costs.always[side] if costs.always else None
        begin = always.seconds if always else 0.0
        if costs.granules == 0 and side == GPU:  # no expert can be on the GPU
            elsewhere = np.array([True])
        return begin + _at_once(own, other) + hand_over * elsewhere, np.full(len(granules), side)
    seconds = _at_once(own, other) + hand_over * elsewhere
    out = np.full(len(granules), side)
    whole = 0 if side == GPU else costs.granules
    if side == GPU or costs.granules:
        seconds[whole] = other[whole] + hand_over / 2
        out[whole] = 1 - side
    return seconds, out


def _at_once(own: Array, other: Array) -> Array:
    """Seconds of two overlapped shards: the longer one, plus the overlap loss of the shorter one."""
    return np.maximum(own, other) + OVERLAP_LOSS * np.minimum(own, other)


@dataclass(frozen=True)
class Found:
    """A candidate: its layers' placements and its `NonLayerPlacement`; `seconds` per token, including
    the disk.
    """

    choices: tuple[Choice, ...]
    non_layer: NonLayerPlacement
    seconds: float
    gpu_bytes: float
    cpu_bytes: float


def penalty(budget: Budget, cpu_bytes: Array) -> Array:
    """Seconds per token of waiting for the disk."""
    missing = budget.missing(cpu_bytes)
    with np.errstate(invalid="ignore"):
        return np.where(missing > 0, missing * budget.disk_seconds_per_byte, 0.0)


class OracleSearch:
    """As `Search`, with the placements of the oracle."""

    def __init__(
        self, costs: Sequence[LayerCosts], non_layer: Sequence[NonLayerPlacement], sync_seconds: float
    ) -> None:
        self._search = Search(costs, non_layer, sync_seconds)
        self._searches = [PricedSearch(costs, non_layer, sync_seconds, attend) for attend in (False, True)]

    def best(self, budget: Budget, attend: bool = False) -> Placement | None:
        result = self._searches[attend].best(budget)
        if result is None:
            return None
        layers = [LayerDevices(selection.attention, selection.granules) for selection in result.choices]
        return replace(self.placement(layers, result.non_layer), seconds=result.seconds)

    def placement(self, layers: Sequence[LayerDevices], non_layer: NonLayerPlacement) -> Placement:
        return self._search.placement(layers, non_layer)


class PricedSearch:
    """All candidates for one model on one machine; `best` selects by budget. `attend`: only candidates with
    all attention on the GPU, where possible.
    """

    def __init__(
        self,
        costs: Sequence[LayerCosts],
        non_layer: Sequence[NonLayerPlacement],
        hand_over: float,
        attend: bool = False,
    ) -> None:
        self._attend = attend
        self._tables = _shared_tables(costs, hand_over, attend)
        self.non_layer = non_layer
        self._hand_over = hand_over

    def best(self, budget: Budget) -> Found | None:
        """The fastest placement that uses the GPU within the budget; None: there is none."""
        best, room = None, budget.gpu_bytes - budget.gpu_fixed
        for non_layer in self.non_layer:
            for begin, end in self._paths[non_layer]:
                for order in (range(len(self._tables) - 1, -1, -1), range(len(self._tables))):
                    best = self._along(begin, end, order, non_layer, budget, room, best)
        return best

    def placement(self, vocabulary: Sequence[Choice], non_layer: NonLayerPlacement) -> Found:
        """A placement with its cost, computed as in the search."""
        seconds, gpu_bytes, cpu_bytes, side = (
            non_layer.seconds,
            non_layer.gpu_bytes,
            non_layer.cpu_bytes,
            non_layer.embedding,
        )
        for table, selection in zip(self._tables, vocabulary, strict=True):
            taken, on_gpu, on_cpu, out = table.part(selection)
            seconds += taken[side]
            gpu_bytes += on_gpu
            cpu_bytes += on_cpu
            side = out
        seconds += self._hand_over / 2 if side != non_layer.head else 0.0
        return Found(tuple(vocabulary), non_layer, float(seconds), float(gpu_bytes), float(cpu_bytes))

    @cached_property
    def _paths(self) -> dict[NonLayerPlacement, list[tuple[tuple[Choice, ...], tuple[Choice, ...]]]]:
        """For each `NonLayerPlacement`, the pairs of placements between which layers change one by one."""
        nothing = tuple(Choice(CPU, CPU, 0) for _ in self._tables)
        attention = tuple(self._least(table, GPU, 0) for table in self._tables)
        everything = tuple(self._least(table, GPU, table.out.shape[1] - 1) for table in self._tables)
        plain = [(attention, everything)]
        if not self._attend:
            plain += [(nothing, everything), (nothing, attention)]
        result = {}
        for non_layer in self.non_layer:
            frontier = self._frontier(non_layer)
            result[non_layer] = [*plain, *pairwise(frontier)]
        return result

    @staticmethod
    def _least(table: LayerTable, side: int, granules: int) -> Choice:
        """Attention and cache on that device if possible, and `granules` units on the GPU."""
        selection = Choice(side, side, granules)
        possible = isfinite(table.part(selection).seconds[CPU])
        return selection if possible else Choice(CPU, CPU, 0)

    def _frontier(self, non_layer: NonLayerPlacement) -> list[tuple[Choice, ...]]:
        """Placements that are the fastest for their GPU bytes, in rising order of bytes."""
        least, most = self._at_price(1.0, non_layer), self._at_price(0.0, non_layer)
        return [least.choices, *(p.choices for p in self._between(least, most, 0)), most.choices]

    def _between(self, small: Found, large: Found, depth: int) -> Iterator[Found]:
        gap = large.gpu_bytes - small.gpu_bytes
        if depth == DEEPEST_BISECTION or gap < SMALLEST_GAP_BYTES:
            return
        middle = self._at_price(max(small.seconds - large.seconds, 0.0) / gap, non_layer=small.non_layer)
        if not small.gpu_bytes < middle.gpu_bytes < large.gpu_bytes:
            return
        yield from self._between(small, middle, depth + 1)
        yield middle
        yield from self._between(middle, large, depth + 1)

    def _at_price(self, price: float, non_layer: NonLayerPlacement) -> Found:
        """The placement with the minimum of seconds + price · GPU bytes."""
        scores = {side: (0.0 if side == non_layer.embedding else np.inf) for side in DEVICE_INDICES}
        came: list[dict[int, tuple[int, int]]] = []
        priced: dict[int, dict[tuple[int, int], tuple[float, int]]] = {}
        for table in self._tables:
            best = priced.setdefault(id(table), {}) or table.best(price)
            priced[id(table)] = best
            step, back = {}, {}
            for out in DEVICE_INDICES:
                sums = [scores[side] + best[side, out][0] for side in DEVICE_INDICES]
                side = int(np.argmin(sums))
                step[out], back[out] = sums[side], (side, best[side, out][1])
            scores = step
            came.append(back)
        side = min(
            DEVICE_INDICES,
            key=lambda out: scores[out] + (self._hand_over / 2 if out != non_layer.head else 0.0),
        )
        vocabulary = []
        for table, back in zip(reversed(self._tables), reversed(came), strict=True):
            side, flat = back[side]
            vocabulary.append(table.choice(flat))
        return self.placement(vocabulary[::-1], non_layer)

    def _along(
        self,
        begin: Sequence[Choice],
        end: Sequence[Choice],
        order: Sequence[int],
        non_layer: NonLayerPlacement,
        budget: Budget,
        room: float,
        best: Found | None,
    ) -> Found | None:
        """The best of `best` and the placements from `begin` to `end` that fit. Layers change in `order`; the
        layer at the limit takes its best placement that fits.
        """
        vocabulary, result = list(begin), best
        for layer in order:
            if begin[layer] == end[layer]:
                continue
            rest, table = self.placement(vocabulary, non_layer), self._tables[layer]
            own = table.part(vocabulary[layer])
            others_gpu, others_cpu = rest.gpu_bytes - own.gpu_bytes, rest.cpu_bytes - own.cpu_bytes
            side = non_layer.embedding if layer == 0 else self._out(layer - 1, vocabulary[layer - 1])
            after = self._after(layer, vocabulary, non_layer)
            others = rest.seconds - own.seconds[side] - after[own.out]
            every = others + table.seconds[side] + after[table.out]
            every = every + penalty(budget, others_cpu + table.cpu_bytes)
            every = np.where(others_gpu + table.gpu_bytes <= room, every, np.inf)
            if non_layer.head == GPU and all(
                c.attention == CPU for c in (*vocabulary[:layer], *vocabulary[layer + 1 :])
            ):
                every[PAIRS.index((CPU, CPU))] = np.inf  # a lone output matrix needs no synchronization
            if not np.isfinite(every).any():
                vocabulary[layer] = end[layer]
                continue
            flat = int(np.argmin(every))
            if every.flat[flat] < (result.seconds if result else np.inf):
                changed = [*vocabulary[:layer], table.choice(flat), *vocabulary[layer + 1 :]]
                result = replace(self.placement(changed, non_layer), seconds=float(every.flat[flat]))
            vocabulary[layer] = end[layer]
        return result

    def _out(self, layer: int, selection: Choice) -> int:
        return self._tables[layer].part(selection).out

    def _after(self, layer: int, vocabulary: Sequence[Choice], non_layer: NonLayerPlacement) -> Array:
        """Seconds of the part after the layer, indexed by the device of the layer's output."""
        if layer + 1 == len(vocabulary):
            return np.array(
                [self._hand_over / 2 if side != non_layer.head else 0.0 for side in DEVICE_INDICES]
            )
        return np.array(self._tables[layer + 1].part(vocabulary[layer + 1]).seconds)


def _shared_tables(costs: Sequence[LayerCosts], hand_over: float, attend: bool) -> list[LayerTable]:
    """One table per layer; layers with equal costs share a table."""
    tables: dict[int, LayerTable] = {}
    for layer in costs:
        if id(layer) not in tables:
            tables[id(layer)] = LayerTable(layer, hand_over, attend)
    return [tables[id(layer)] for layer in costs]
