"""A placement as a list of items: device, cost per token, and limiting factor of each part."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from edgeinfer_kernels.sizes.model_sizes import LayerSizes
from edgeinfer_offload.planner.layer_costs import Cost, LayerCosts
from edgeinfer_offload.planner.placement_search import CPU, GPU, SIDES, LayerDevices, Placement
from edgeinfer_offload.planner.plan_types import LayerPlacement, Place, PlannedItem, SparseLayer

PLACES: tuple[Place, Place] = ("cpu", "gpu")


@dataclass(frozen=True)
class PlacedLayer:
    """One layer's items and its placement."""

    items: tuple[PlannedItem, ...]
    placement: LayerPlacement


def placed_layer(
    index: int,
    layer: LayerSizes,
    costs: LayerCosts,
    choice: LayerDevices,
    routing: tuple[float, ...] | None,
    by_neuron: SparseLayer | None,
    weights_place: Place,
    changing: bool = False,
) -> PlacedLayer:
    """`routing`, `by_neuron`: this layer's entries of `PlanOptions`. `weights_place`: where the CPU's weights
    are stored, "cpu", or "disk" if memory-mapped. `changing`: with an expert cache; if the experts are split,
    the CPU holds all of them.
    """
    places: tuple[Place, Place] = (weights_place, "gpu")
    hidden = _hidden(costs, choice)
    items = []

    def add(
        name: str, place: Place, side: int, cost: Cost, overlapped: bool = False, read: float = 1.0
    ) -> None:
        ms, bound, weights = 1000 * cost.seconds, bound_by(side, cost), int(read * cost.nbytes)
        name = f"layer {index} {name}"
        items.append(PlannedItem(name, place, cost.nbytes, ms, bound, index, overlapped, weights))

    attention = costs.attention[choice.attention]
    cache = costs.cache[choice.attention]
    assert attention is not None
    assert cache is not None
    block = layer.divisible
    add(layer.undivided_label, places[choice.attention], choice.attention, attention)
    if cache.nbytes:
        add(layer.state_label, PLACES[choice.attention], choice.attention, cache, read=0.0)
    if costs.always and block is not None:
        always = costs.always[choice.attention]
        assert always is not None
        add(block.label, places[choice.attention], choice.attention, always)
    own = costs.unit_neurons[choice.units]
    total = 0 if block is None else block.units
    what, units = ("", "") if block is None else (block.units_label, block.unit_name)
    is_routed = block is not None and block.is_routed
    changing = changing and is_routed and 0 < own < total
    cold = by_neuron.cold(own, total) if by_neuron and own < total else None
    for side, count in ((GPU, own), (CPU, total - own)):
        if count:
            name = what if count == total else f"{what}, {count} of {total}{units}"
            read = block.units_per_token / total if block is not None and is_routed else 1.0
            if changing and side == CPU:
                name, read = f"{what}, all for {count} of {total}", read * count / total
            if cold and side == CPU:
                name += ", by neuron with a predictor" if cold.predictor else ", by neuron"
                read = (cold.read + cold.predictor) / (cold.held + cold.predictor)
            add(name, places[side], side, _half(costs, choice.units, side), hidden == side, read)
    if cold:
        add("feed-forward, long steps", "disk", CPU, Cost(cold.in_file, 0.0, 0.0), read=0.0)
    placement = _placement(layer, choice, own, routing, weights_place)
    return PlacedLayer(tuple(items), replace(placement, changing=changing))


def _half(costs: LayerCosts, units: int, side: int) -> Cost:
    if side == GPU:
        columns = costs.gpu_bytes, costs.gpu_seconds, costs.gpu_reading
    else:
        columns = costs.cpu_bytes, costs.cpu_seconds, costs.cpu_reading
    nbytes, seconds, reading = (float(column[units]) for column in columns)
    return Cost(int(nbytes), seconds, reading)


def _hidden(costs: LayerCosts, choice: LayerDevices) -> int | None:
    """The device whose feed-forward shard finishes first; None: there is only one shard."""
    halves = [float(costs.cpu_seconds[choice.units]), float(costs.gpu_seconds[choice.units])]
    if min(halves) == 0:
        return None
    return min(SIDES, key=lambda side: halves[side])


def bound_by(side: int, cost: Cost) -> str:
    """The limiting factor of a part: its device's memory bandwidth, or startup."""
    if not cost.seconds:
        return ""
    what = "memory" if cost.reading >= cost.seconds / 2 else "latency"
    return f"{'GPU' if side == GPU else 'CPU'} {what}"


def _placement(
    layer: LayerSizes, choice: LayerDevices, own: int, routing: tuple[float, ...] | None, weights_place: Place
) -> LayerPlacement:
    places: tuple[Place, Place] = (weights_place, "gpu")
    attention, cache = places[choice.attention], PLACES[choice.attention]
    block = layer.divisible
    if block is None or not block.is_routed:
        neurons = 0 if block is None else block.units
        return LayerPlacement(attention, cache, hot_neurons=own, neurons=neurons, rest=weights_place)
    numbers = range(block.units)
    hottest = sorted(numbers, key=lambda number: -routing[number]) if routing else list(numbers)
    return LayerPlacement(
        attention, cache, gpu_experts=tuple(sorted(hottest[:own])), experts=len(numbers), rest=weights_place
    )


def hand_over_seconds(costs: Sequence[LayerCosts], chosen: Placement, each: float) -> float:
    """Seconds per token of CPU-GPU synchronization: half of `each` one way, all of it where shards join."""
    halves, side = 0, chosen.ends.start
    for layer, choice in zip(costs, chosen.layers, strict=True):
        halves += choice.attention != side
        side = choice.attention
        wholly_on = CPU if choice.units == 0 else GPU if choice.units == layer.units else None
        if wholly_on == side:
            continue
        if wholly_on is None or layer.is_mixture:
            halves += 2
        else:
            halves, side = halves + 1, wholly_on
    return (halves + (side != chosen.ends.head)) * each / 2
