"""Disk offload: which weights stay memory-mapped if main memory is too small, and how long tokens wait."""

from collections.abc import Sequence
from dataclasses import replace

from edgeinfer_kernels.cpu.disk.file_stream import stream_bytes
from edgeinfer_offload.machine.cost_constants import MAPPED_SLOWDOWN
from edgeinfer_offload.planner.layer_placement import LayerPlacement
from edgeinfer_offload.planner.placement_problem import PlacementProblem
from edgeinfer_offload.planner.plan_items import LONG_STEPS, PlacementItems
from edgeinfer_offload.planner.plan_types import READ_AHEAD, PlannedItem


def offloaded(
    placed: PlacementItems, problem: PlacementProblem
) -> tuple[list[PlannedItem], list[LayerPlacement], float]:
    """Move CPU weights to disk until main memory is large enough.

    Returns the items, the layers, and the seconds that a prompt waits for the disk. The order is: experts (a
    token reads only a few), feed-forwards, attention, the output matrix; last layers first. What the page
    cache can't hold is read ahead, if it can be.
    """
    items, layers = _moved(placed, problem, 0)
    if problem.options.streamed and _file_seconds(items, problem):
        items, layers = _moved(placed, problem, _read_ahead_bytes(problem))
    return items, layers, _wait(items, problem)


def _moved(
    placed: PlacementItems, problem: PlacementProblem, buffers: int
) -> tuple[list[PlannedItem], list[LayerPlacement]]:
    """The items and the layers after moving; `buffers`: bytes for reading ahead."""
    items, layers = list(placed.items), list(placed.layers)
    missing = _cpu_bytes(items) - problem.ram
    workspace = [i for i, item in enumerate(items) if (item.item, item.device) == ("workspace", "cpu")]
    if problem.options.disk and missing > 0 and workspace:
        (at,) = workspace
        items[at] = replace(items[at], bytes=items[at].bytes + problem.buffers.file_rows_bytes)
        if buffers:
            items.insert(at + 1, PlannedItem(READ_AHEAD, "cpu", buffers, 0.0))
        _move(items, layers, missing + problem.buffers.file_rows_bytes + buffers)
    return items, layers


def _read_ahead_bytes(problem: PlacementProblem) -> int:
    """Bytes of the buffers for the largest block that can be on disk; 0: there is none."""
    largest: list[int] = []
    for layer in problem.sizes.layers:
        dense = [layer.divisible.granule_matrices()] if layer.divisible and not layer.routed else []
        for matrices in (*dense, *(block.undivided() for block in layer.undivided)):
            found = [matrix.nbytes for matrix in matrices]
            largest = max(largest, found, key=stream_bytes)
    return stream_bytes(largest)


def _cpu_bytes(items: Sequence[PlannedItem]) -> int:
    return sum(item.bytes for item in items if item.device == "cpu")


def _move(items: list[PlannedItem], layers: list[LayerPlacement], missing: float) -> None:
    """Move items of at least `missing` bytes to disk."""
    for index in sorted(range(len(items)), key=lambda at: (_rank(items[at]), -at)):
        item = items[index]
        if missing <= 0 or item.device != "cpu" or _rank(item) == _NEVER:
            continue
        missing -= item.bytes
        slower, reading = MAPPED_SLOWDOWN * item.ms_per_token, MAPPED_SLOWDOWN * item.reading_ms
        items[index] = replace(item, device="disk", ms_per_token=slower, reading_ms=reading, overlapped=False)
        if item.layer is not None:
            device = {"attention": "disk"} if _rank(item) == _ATTENTION else {"rest": "disk"}
            layers[item.layer] = replace(layers[item.layer], **device)  # type: ignore[arg-type]


def _file_seconds(items: Sequence[PlannedItem], problem: PlacementProblem) -> float:
    """Seconds for each byte of the memory-mapped items; 0: the page cache holds them."""
    read = sum(item.bytes for item in items if item.device == "disk" and item.weights_read)
    long_steps = sum(item.bytes for item in items if item.item.endswith(LONG_STEPS))
    return problem.disk_seconds(read + long_steps, _cpu_bytes(items))


def _wait(items: list[PlannedItem], problem: PlacementProblem) -> float:
    """Add disk time to memory-mapped items that don't fit the page cache; returns the seconds per prompt."""
    disk = _file_seconds(items, problem)
    if not disk:
        return 0.0
    reads_ahead = any(item.item == READ_AHEAD for item in items)
    waited = 0.0
    for index, item in enumerate(items):
        if item.item.endswith(LONG_STEPS):
            waited += item.bytes * disk
        if item.device != "disk" or not item.weights_read:
            continue
        if reads_ahead and item.layer is not None and _rank(item) in (_FEED_FORWARD, _ATTENTION):
            waiting = item.bytes / problem.machine.disk.bytes_per_second
            shown = max(0.0, 1000 * waiting - item.ms_per_token)
        else:
            waiting = item.bytes * disk
            shown = 1000 * item.weights_read * disk
        waited += waiting
        items[index] = replace(
            item,
            ms_per_token=item.ms_per_token + shown,
            reading_ms=item.reading_ms + shown,
            bound="disk",
        )
    return waited


_EXPERTS, _FEED_FORWARD, _ATTENTION, _HEAD, _NEVER = range(5)


def _rank(item: PlannedItem) -> int:
    """The order in which an item's weights move to disk; routers, caches and buffers never do."""
    name = item.item if item.layer is None else item.item.removeprefix(f"layer {item.layer} ")
    ranks = {"experts": _EXPERTS, "feed-forward": _FEED_FORWARD, "attention": _ATTENTION, "head": _HEAD}
    return ranks.get(name.partition(",")[0], _NEVER)
