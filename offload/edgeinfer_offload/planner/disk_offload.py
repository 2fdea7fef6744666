"""What main memory can't hold stays in the file: which weights those are, and how long a token waits."""

from collections.abc import Sequence
from dataclasses import replace

from edgeinfer_offload.planner.layer_costs import MAPPED_SLOWDOWN
from edgeinfer_offload.planner.placement_problem import PlacementProblem
from edgeinfer_offload.planner.plan_types import LayerPlacement, PlannedItem


def spilled(
    items: Sequence[PlannedItem], layers: Sequence[LayerPlacement], placing: PlacementProblem
) -> tuple[list[PlannedItem], list[LayerPlacement], float]:
    """Items and layers with as many of the CPU's weights on the disk as main memory is short of, and the
    seconds that a prompt waits for the disk.

    First go experts, of which a token reads a few, then feed-forwards, attention and the head; of equals,
    the last layers.
    """
    items, layers = list(items), list(layers)
    missing = _bytes_here(items) - placing.ram
    workspace = [i for i, item in enumerate(items) if (item.item, item.device) == ("workspace", "cpu")]
    if placing.wishes.disk and missing > 0 and workspace:
        (at,) = workspace
        items[at] = replace(items[at], bytes=items[at].bytes + placing.file_rows_bytes)
        _move(items, layers, missing + placing.file_rows_bytes)
    return items, layers, _wait(items, placing)


def _bytes_here(items: Sequence[PlannedItem]) -> int:
    return sum(item.bytes for item in items if item.device == "cpu")


def _move(items: list[PlannedItem], layers: list[LayerPlacement], missing: float) -> None:
    """As many items to the disk as have the missing bytes."""
    for index in sorted(range(len(items)), key=lambda at: (_turn(items[at]), -at)):
        item = items[index]
        if missing <= 0 or item.device != "cpu" or _turn(item) == _NEVER:
            continue
        missing -= item.bytes
        slower = MAPPED_SLOWDOWN * item.ms_per_token
        items[index] = replace(item, device="disk", ms_per_token=slower, overlapped=False)
        if item.layer is not None:
            place = {"attention": "disk"} if _turn(item) == _ATTENTION else {"rest": "disk"}
            layers[item.layer] = replace(layers[item.layer], **place)  # type: ignore[arg-type]


def _wait(items: list[PlannedItem], placing: PlacementProblem) -> float:
    """Add the time that items on the disk wait for it, if the system's cache can't hold them; seconds of a
    prompt.
    """
    read = sum(item.bytes for item in items if item.device == "disk" and item.weights_read)
    disk = placing.disk_seconds(read, _bytes_here(items))
    if not disk:
        return 0.0
    for index, item in enumerate(items):
        if item.device == "disk" and item.weights_read:
            seconds = item.weights_read * disk + item.ms_per_token / 1000
            items[index] = replace(item, ms_per_token=1000 * seconds, bound="disk")
    return read * disk


_EXPERTS, _FEED_FORWARD, _ATTENTION, _HEAD, _NEVER = range(5)


def _turn(item: PlannedItem) -> int:
    """When an item's weights leave main memory; a router, a cache, a buffer never do."""
    name = item.item if item.layer is None else item.item.removeprefix(f"layer {item.layer} ")
    turns = {"experts": _EXPERTS, "feed-forward": _FEED_FORWARD, "attention": _ATTENTION, "head": _HEAD}
    return turns.get(name.partition(",")[0], _NEVER)
