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


class PartPlacement(NamedTuple):
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

    def __init__(self, costs: LayerCosts, sync_seconds: float, attend: bool = False) -> None:
        """`attend`: attention must be on the GPU."""
        shape = len(PAIRS), costs.granules + 1
        self.gpu_bytes, self.cpu_bytes = np.zeros(shape), np.zeros(shape)
        self.out = np.zeros(shape, np.int64)
        own = np.full(shape, np.inf)
        for row, (attention, cache) in enumerate(PAIRS):
            part_bytes = costs.attention[attention], costs.cache[cache]
            if (
                part_bytes[0] is None
                or part_bytes[1] is None
                or (attention == GPU and not costs.gpu_can_attend)
            ):
                continue
            block, out = _feed_forward(costs, attention, sync_seconds)
            always = costs.always[attention] if costs.always else None
            fixed = [(attention, part_bytes[0]), (cache, part_bytes[1])]
            fixed += [(attention, always)] if always else []
            self.cpu_bytes[row] = costs.cpu_bytes + sum(c.nbytes for side, c in fixed if side == CPU)
            self.gpu_bytes[row] = costs.gpu_bytes + sum(c.nbytes for side, c in fixed if side == GPU)
            own[row] = block + part_bytes[0].seconds + part_bytes[1].seconds
            if attention == CPU:  # attention on the CPU leaves the activations on the CPU
                own[row, 0 if attend else 1 :] = np.inf
            self.out[row] = out
        self._parts: dict[PartPlacement, Part] = {}
        half_sync = sync_seconds / 2
        sync = [[half_sync if pair[0] != side else 0.0] for side in DEVICE_INDICES for pair in PAIRS]
        self.seconds = (
            own + np.array(sync[: len(PAIRS)]),
            own + np.array(sync[len(PAIRS) :]),
        )

    def index(self, selection: PartPlacement) -> tuple[int, int]:
        return PAIRS.index((selection.attention, selection.cache)), selection.granules

    def part(self, selection: PartPlacement) -> Part:
        """The costs of a placement; cached, because the search repeats them."""
        result = self._parts.get(selection)
        if result is None:
            at = self.index(selection)
            seconds = float(self.seconds[CPU][at]), float(self.seconds[GPU][at])
            result = Part(seconds, float(self.gpu_bytes[at]), float(self.cpu_bytes[at]), int(self.out[at]))
            self._parts[selection] = result
        return result

    def placement(self, flat: int) -> PartPlacement:
        row, granules = divmod(flat, self.out.shape[1])
        return PartPlacement(*PAIRS[row], granules)

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


def _feed_forward(costs: LayerCosts, side: int, sync_seconds: float) -> tuple[Array, npt.NDArray[np.int64]]:
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
    if costs.is_joined:
        always = costs.always[side] if costs.always else None
        begin = always.seconds if always else 0.0
        if costs.granules == 0 and side == GPU:  # no expert can be on the GPU
            elsewhere = np.array([True])
        return begin + _overlapped_seconds(own, other) + sync_seconds * elsewhere, np.full(
            len(granules), side
        )
    seconds = _overlapped_seconds(own, other) + sync_seconds * elsewhere
    out = np.full(len(granules), side)
    whole = 0 if side == GPU else costs.granules
    if side == GPU or costs.granules:
        seconds[whole] = other[whole] + sync_seconds / 2
        out[whole] = 1 - side
    return seconds, out


def _overlapped_seconds(own: Array, other: Array) -> Array:
    """Seconds of two overlapped shards: the longer one, plus the overlap loss of the shorter one."""
    return np.maximum(own, other) + OVERLAP_LOSS * np.minimum(own, other)


@dataclass(frozen=True)
class Found:
    """A candidate: its layers' placements and its `NonLayerPlacement`; `seconds` per token, including
    the disk.
    """

    placements: tuple[PartPlacement, ...]
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
        layers = [LayerDevices(selection.attention, selection.granules) for selection in result.placements]
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
        sync_seconds: float,
        attend: bool = False,
    ) -> None:
        self._attend = attend
        self._tables = _shared_tables(costs, sync_seconds, attend)
        self.non_layer = non_layer
        self._sync_seconds = sync_seconds

    def best(self, budget: Budget) -> Found | None:
        """The fastest placement that uses the GPU within the budget; None: there is none."""
        best, room = None, budget.gpu_bytes - budget.gpu_fixed
        for non_layer in self.non_layer:
            for begin, end in self._paths[non_layer]:
                for order in (range(len(self._tables) - 1, -1, -1), range(len(self._tables))):
                    best = self._along(begin, end, order, non_layer, budget, room, best)
        return best

    def placement(self, placements: Sequence[PartPlacement], non_layer: NonLayerPlacement) -> Found:
        """A placement with its cost, computed as in the search."""
        seconds, gpu_bytes, cpu_bytes, side = (
            non_layer.seconds,
            non_layer.gpu_bytes,
            non_layer.cpu_bytes,
            non_layer.embedding,
        )
        for table, selection in zip(self._tables, placements, strict=True):
            taken, on_gpu, on_cpu, out = table.part(selection)
            seconds += taken[side]
            gpu_bytes += on_gpu
            cpu_bytes += on_cpu
            side = out
        seconds += self._sync_seconds / 2 if side != non_layer.head else 0.0
        return Found(tuple(placements), non_layer, float(seconds), float(gpu_bytes), float(cpu_bytes))

    @cached_property
    def _paths(
        self,
    ) -> dict[NonLayerPlacement, list[tuple[tuple[PartPlacement, ...], tuple[PartPlacement, ...]]]]:
        """For each `NonLayerPlacement`, the pairs of placements between which layers change one by one."""
        nothing = tuple(PartPlacement(CPU, CPU, 0) for _ in self._tables)
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
    def _least(table: LayerTable, side: int, granules: int) -> PartPlacement:
        """Attention and cache on that device if possible, and `granules` units on the GPU."""
        selection = PartPlacement(side, side, granules)
        possible = isfinite(table.part(selection).seconds[CPU])
        return selection if possible else PartPlacement(CPU, CPU, 0)

    def _frontier(self, non_layer: NonLayerPlacement) -> list[tuple[PartPlacement, ...]]:
        """Placements that are the fastest for their GPU bytes, in rising order of bytes."""
        least, most = self._at_price(1.0, non_layer), self._at_price(0.0, non_layer)
        return [least.placements, *(p.placements for p in self._between(least, most, 0)), most.placements]

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
        sources: list[dict[int, tuple[int, int]]] = []
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
            sources.append(back)
        side = min(
            DEVICE_INDICES,
            key=lambda out: scores[out] + (self._sync_seconds / 2 if out != non_layer.head else 0.0),
        )
        placements = []
        for table, back in zip(reversed(self._tables), reversed(sources), strict=True):
            side, flat = back[side]
            placements.append(table.placement(flat))
        return self.placement(placements[::-1], non_layer)

    def _along(
        self,
        begin: Sequence[PartPlacement],
        end: Sequence[PartPlacement],
        order: Sequence[int],
        non_layer: NonLayerPlacement,
        budget: Budget,
        room: float,
        best: Found | None,
    ) -> Found | None:
        """The best of `best` and the placements from `begin` to `end` that fit. Layers change in `order`; the
        layer at the limit takes its best placement that fits.
        """
        placements, result = list(begin), best
        for layer in order:
            if begin[layer] == end[layer]:
                continue
            rest, table = self.placement(placements, non_layer), self._tables[layer]
            own = table.part(placements[layer])
            others_gpu, others_cpu = rest.gpu_bytes - own.gpu_bytes, rest.cpu_bytes - own.cpu_bytes
            side = non_layer.embedding if layer == 0 else self._out(layer - 1, placements[layer - 1])
            after = self._after(layer, placements, non_layer)
            others = rest.seconds - own.seconds[side] - after[own.out]
            every = others + table.seconds[side] + after[table.out]
            every = every + penalty(budget, others_cpu + table.cpu_bytes)
            every = np.where(others_gpu + table.gpu_bytes <= room, every, np.inf)
            if non_layer.head == GPU and all(
                c.attention == CPU for c in (*placements[:layer], *placements[layer + 1 :])
            ):
                every[PAIRS.index((CPU, CPU))] = np.inf  # a lone output matrix needs no synchronization
            if not np.isfinite(every).any():
                placements[layer] = end[layer]
                continue
            flat = int(np.argmin(every))
            if every.flat[flat] < (result.seconds if result else np.inf):
                changed = [*placements[:layer], table.placement(flat), *placements[layer + 1 :]]
                result = replace(self.placement(changed, non_layer), seconds=float(every.flat[flat]))
            placements[layer] = end[layer]
        return result

    def _out(self, layer: int, selection: PartPlacement) -> int:
        return self._tables[layer].part(selection).out

    def _after(self, layer: int, placements: Sequence[PartPlacement], non_layer: NonLayerPlacement) -> Array:
        """Seconds of the part after the layer, indexed by the device of the layer's output."""
        if layer + 1 == len(placements):
            return np.array(
                [self._sync_seconds / 2 if side != non_layer.head else 0.0 for side in DEVICE_INDICES]
            )
        return np.array(self._tables[layer + 1].part(placements[layer + 1]).seconds)


def _shared_tables(costs: Sequence[LayerCosts], sync_seconds: float, attend: bool) -> list[LayerTable]:
    """One table per layer; layers with equal costs share a table."""
    tables: dict[int, LayerTable] = {}
    for layer in costs:
        if id(layer) not in tables:
            tables[id(layer)] = LayerTable(layer, sync_seconds, attend)
    return [tables[id(layer)] for layer in costs]
