"""A placement as a list of items: device, cost per token, and limiting factor of each part."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from edgeinfer_kernels.blocks.common.block_sizes import DivisibleSizes
from edgeinfer_kernels.matrix import MatrixSize
from edgeinfer_kernels.sizes.cuda_buffers import expert_load_bytes
from edgeinfer_kernels.sizes.cuda_matrices import table_bytes
from edgeinfer_kernels.sizes.model_sizes import PER_LAYER, LayerSizes
from edgeinfer_kernels.stages import host_batch
from edgeinfer_offload.machine.cost_constants import LIBRARY_BYTES, OVERLAP_LOSS
from edgeinfer_offload.planner.layer_costs import Cost, LayerCosts
from edgeinfer_offload.planner.layer_placement import DeviceName, LayerPlacement
from edgeinfer_offload.planner.placement_problem import PlacementProblem
from edgeinfer_offload.planner.placement_search import CPU, DEVICE_INDICES, GPU, LayerDevices, Placement
from edgeinfer_offload.planner.plan_types import CUDA_CONTEXT, DRAFT, DRAFT_HEAD, LIBRARIES, PlannedItem
from edgeinfer_offload.planner.prompt_speed import PromptSpeed
from edgeinfer_offload.planner.roofline import Work

DEVICES = ("cpu", "gpu")
"""Names of the sides."""
LONG_STEPS = "long steps"
"""The item of weights that only prompts read from the file, as short steps read them by neuron."""


@dataclass(frozen=True)
class PlacementItems:
    """The items of a placement before disk offload, and the placements of its layers."""

    items: list[PlannedItem]
    layers: list[LayerPlacement]


def placement_items(problem: PlacementProblem, placement: Placement, speed: PromptSpeed) -> PlacementItems:
    """All items: the layers in order, then what is outside of them."""
    items: list[PlannedItem] = []
    for index, devices in enumerate(placement.layers):
        items += _layer_items(problem, index, devices)
    overlapped = sum(item.ms_per_token for item in items if item.overlapped)
    items += _end_items(problem, placement)
    items += _buffer_items(problem, placement, speed)
    items += _latency_items(problem, placement, overlapped)
    layers = [_layer_placement(problem, index, devices) for index, devices in enumerate(placement.layers)]
    return PlacementItems(items, layers)


def _layer_items(problem: PlacementProblem, index: int, devices: LayerDevices) -> list[PlannedItem]:
    layer, costs, device_index = problem.sizes.layers[index], problem.costs[index], devices.attention
    attention, cache, block = costs.attention[device_index], costs.cache[device_index], layer.divisible
    assert attention is not None
    assert cache is not None
    device = problem.weights_device if device_index == CPU else "gpu"
    items = []
    if layer.undivided or attention.nbytes:
        name, matrices = layer.undivided_label or "norm", [m for b in layer.undivided for m in b.undivided()]
        items.append(_layer_item(index, name, device, device_index, attention, _reading(attention, matrices)))
    if cache.nbytes:
        work = _state_work(problem, layer, on_gpu=device_index == GPU)
        name = layer.state_name(problem.pricing.context)
        state = _layer_item(index, name, DEVICES[device_index], device_index, cache, work)
        items.append(replace(state, weights_read=0))
    if block is None:
        return items
    if costs.always and (always := costs.always[device_index]):
        matrices = block.undivided()
        if device_index == CPU:
            matrices = [m for m in matrices if not any(m is each for each in block.replicated())]
        items.append(
            _layer_item(index, block.label, device, device_index, always, _reading(always, matrices))
        )
    return items + _granule_items(problem, index, devices, block)


def _reading(cost: Cost, matrices: Iterable[MatrixSize], read: float = 1.0) -> Work:
    """The work of a token with a part of these matrices, of whose bytes it reads the share `read`."""
    return Work(2 * read * sum(matrix.weights for matrix in matrices), read * cost.nbytes)


def _state_work(problem: PlacementProblem, layer: LayerSizes, *, on_gpu: bool) -> Work:
    pricing = problem.pricing
    operations = sum(block.state_operations(1, pricing.depth) for block in layer.blocks)
    return Work(operations, pricing.state_bytes_read(layer, on_gpu=on_gpu))


def _granule_items(
    problem: PlacementProblem, index: int, devices: LayerDevices, block: DivisibleSizes
) -> list[PlannedItem]:
    """The shards of a divisible block on the GPU and on the CPU."""
    costs, total, items = problem.costs[index], block.granules, []
    own, by_neuron = costs.granule_neurons[devices.granules], problem.sparse.layers.get(index)
    cold = None
    if by_neuron and own < total:
        cold = by_neuron.of_experts(total - own) if block.is_routed else by_neuron.cold(own, total)
    overlapped = _overlapped_device(costs, devices)
    for device_index, count in ((GPU, own), (CPU, total - own)):
        if not count:
            continue
        name = block.granules_label
        if count < total:
            name += f", {count} of {total}{block.granule_name}"
        read = block.granules_per_token / total if block.is_routed else 1.0
        if device_index == CPU and _has_expert_cache(problem, index, own):
            name, read = f"{block.granules_label}, all for {count} of {total}", read * count / total
        if cold and device_index == CPU:
            name += ", by neuron with a predictor" if cold.predictor else ", by neuron"
            name += " from disk" if cold.disk_read_bytes else ""
            read *= (cold.read + cold.predictor) / (cold.held + cold.predictor)
        if device_index == GPU and costs.gathers[devices.granules]:
            hot = problem.sparse.gathered[index].hot(own, total)
            name, read = f"{name}, active gathered", hot.read / hot.held
        device = problem.weights_device if device_index == CPU else "gpu"
        cost = _shard_cost(costs, devices.granules, device_index)
        work = _granule_work(problem, block, cost, device_index, count, read)
        item = _layer_item(index, name, device, device_index, cost, work, overlapped == device_index)
        from_disk = cold and device_index == CPU and cold.disk_reads
        items.append(replace(item, bound="disk") if from_disk else item)
    if cold:
        in_file = Cost(cold.in_file, 0.0, 0.0)
        name = f"{block.granules_label}, {LONG_STEPS}"
        items.append(_layer_item(index, name, "disk", CPU, in_file, Work(0, 0)))
    return items


def _granule_work(
    problem: PlacementProblem, block: DivisibleSizes, cost: Cost, device_index: int, count: int, read: float
) -> Work:
    """The work of a token with `count` units on one device, of whose bytes it reads the share `read`."""
    own = sum(matrix.weights for matrix in block.granule_matrices())
    operations = 2.0 * own * (block.granules_per_token * count / block.granules if block.is_routed else 0)
    if not block.is_routed:
        operations = 2 * own * read * count / block.granules
    if device_index == CPU and block.replicated():
        always = problem.pricing.on_cpu(block.replicated()).nbytes / cost.nbytes
        read = always + (1 - always) * read
        operations += 2 * sum(matrix.weights for matrix in block.replicated())
    return Work(operations, read * cost.nbytes)


def _layer_item(
    index: int,
    name: str,
    device: DeviceName,
    device_index: int,
    cost: Cost,
    work: Work,
    overlapped: bool = False,
) -> PlannedItem:
    """`work`: that of a token, which reads weights."""
    return _item(
        f"layer {index} {name}", device, device_index, cost, work, layer=index, overlapped=overlapped
    )


def _item(
    name: str, device: DeviceName, device_index: int, cost: Cost, work: Work, **more: Any
) -> PlannedItem:
    return PlannedItem(
        name,
        device,
        cost.nbytes,
        1000 * cost.seconds,
        _bound_by(device_index, cost),
        weights_read=int(work.bytes),
        read_bytes=work.bytes,
        operations=work.operations,
        reading_ms=1000 * cost.reading,
        **more,
    )


def _shard_cost(costs: LayerCosts, granules: int, device_index: int) -> Cost:
    columns = costs.gpu_bytes, costs.gpu_seconds, costs.gpu_reading
    if device_index == CPU:
        columns = costs.cpu_bytes, costs.cpu_seconds, costs.cpu_reading
    nbytes, seconds, reading = (float(column[granules]) for column in columns)
    return Cost(int(nbytes), seconds, reading)


def _overlapped_device(costs: LayerCosts, devices: LayerDevices) -> int | None:
    """The device whose feed-forward shard finishes first; None: there is only one shard."""
    seconds = [float(costs.cpu_seconds[devices.granules]), float(costs.gpu_seconds[devices.granules])]
    return min(DEVICE_INDICES, key=lambda device_index: seconds[device_index]) if min(seconds) else None


def _bound_by(device_index: int, cost: Cost) -> str:
    """The limiting factor of a part: its device's memory bandwidth, or startup."""
    if not cost.seconds:
        return ""
    what = "memory" if cost.reading >= cost.seconds / 2 else "latency"
    return f"{DEVICES[device_index].upper()} {what}"


def _has_expert_cache(problem: PlacementProblem, index: int, own: int) -> bool:
    """Whether the CPU holds all experts of a layer, of which `own` are on the GPU."""
    block = problem.sizes.layers[index].routed
    return problem.options.expert_cache and block is not None and 0 < own < block.granules


def _layer_placement(problem: PlacementProblem, index: int, devices: LayerDevices) -> LayerPlacement:
    rest, block = problem.weights_device, problem.sizes.layers[index].divisible
    attention = rest if devices.attention == CPU else "gpu"
    cache, own = DEVICES[devices.attention], problem.costs[index].granule_neurons[devices.granules]
    if block is None or not block.is_routed:
        neurons = 0 if block is None else block.granules
        is_joined = block is not None and block.is_joined
        gathers = own > 0 and problem.costs[index].gathers[devices.granules]
        return LayerPlacement(
            attention,
            cache,
            hot_neurons=own,
            neurons=neurons,
            rest=rest,
            is_joined=is_joined,
            gathers=gathers,
        )
    routing, numbers = problem.options.routing, range(block.granules)
    hottest = sorted(numbers, key=lambda number: -routing[index][number]) if routing else numbers
    experts = tuple(sorted(hottest[:own]))
    has_cache = _has_expert_cache(problem, index, own)
    return LayerPlacement(
        attention, cache, gpu_experts=experts, experts=block.granules, rest=rest, expert_cache=has_cache
    )


def _end_items(problem: PlacementProblem, placement: Placement) -> list[PlannedItem]:
    """The head, the embedding and the draft model."""
    non_layer, head = placement.non_layer, problem.head[placement.non_layer.head]
    assert head is not None
    device = problem.weights_device if non_layer.head == CPU else "gpu"
    items = [_item("head", device, non_layer.head, head, _reading(head, [problem.sizes.head]))]
    embedding = problem.sizes.embedding
    if embedding and non_layer.embedding == GPU:
        items.append(PlannedItem("embedding", "gpu", problem.embedding_gpu_bytes, 0.0))
    elif embedding:
        items.append(PlannedItem("embedding", "disk", embedding.nbytes, 0.0))
    if table := problem.sizes.per_layer:
        here: tuple[DeviceName, int] = ("disk", table.nbytes)
        if non_layer.per_layer_on_gpu:
            here = "gpu", table_bytes(table)
        items.append(PlannedItem(PER_LAYER, *here, 0.0))
    if non_layer.draft is not None and problem.draft and (draft := problem.draft[non_layer.draft]):
        ms, bound = 1000 * draft.seconds, _bound_by(non_layer.draft, draft)
        name = DRAFT_HEAD if problem.options.draft and problem.options.draft.is_draft_head else DRAFT
        items.append(PlannedItem(name, DEVICES[non_layer.draft], draft.nbytes, ms, bound, overlapped=True))
    return items


def _buffer_items(problem: PlacementProblem, placement: Placement, speed: PromptSpeed) -> list[PlannedItem]:
    """Buffers and libraries: bytes that cost no time."""
    on_cpu = problem.works_on_cpu(placement)
    items: list[tuple[str, DeviceName, int]] = []
    if on_cpu:
        streamed_from = speed.stream_min_tokens if placement.non_layer.head == GPU else None
        tokens = host_batch(problem.options.batch, streamed_from)
        items.append(("workspace", "cpu", problem.buffers.cpu_workspace_for(tokens)))
        if (lora := problem.options.lora) is not None:
            threads = problem.machine.processor.threads
            items.append(("LoRA adapters", "cpu", lora.cpu_total(problem.sizes, tokens, threads)))
    if placement.uses_gpu:
        items += [
            ("workspace", "gpu", problem.buffers.gpu_workspace),
            (LIBRARIES, "gpu", LIBRARY_BYTES),
            (CUDA_CONTEXT, "gpu", problem.buffers.driver_bytes),
            ("LoRA adapters", "gpu", lora.gpu_bytes if (lora := problem.options.lora) else 0),
            ("buffers for streamed weights", "gpu", problem.streamed_bytes(placement)),
            ("expert cache buffers", "gpu", expert_load_bytes(problem.sizes) * problem.options.expert_cache),
            ("pinned buffers", "cpu", problem.buffers.staging(on_cpu)),
        ]
    return [PlannedItem(name, device, nbytes, 0.0) for name, device, nbytes in items if nbytes]


def _latency_items(problem: PlacementProblem, placement: Placement, overlapped: float) -> list[PlannedItem]:
    """Time between the parts; `overlapped`: ms per token of overlapped shards."""
    sync = sync_seconds_of(problem.costs, placement, problem.pricing.sync_seconds)
    host = problem.host_seconds(placement)
    items: list[tuple[str, DeviceName, float, str]] = [
        ("synchronization", "link", 1000 * sync, "synchronization"),
        ("overlap loss", "link", OVERLAP_LOSS * overlapped, "synchronization"),
    ]
    if placement.non_layer.head == GPU:
        items.append(("device-to-host copy", "link", 1000 * host, "synchronization"))
    else:
        items.append(("between tokens", "cpu", 1000 * host, "CPU latency"))
    return [PlannedItem(name, device, 0, ms, bound) for name, device, ms, bound in items if ms]


def sync_seconds_of(costs: Sequence[LayerCosts], placement: Placement, each: float) -> float:
    """Seconds per token of CPU-GPU synchronization: half of `each` one way, all of it where shards join."""
    crossings, device_index = 0, placement.non_layer.embedding
    for layer, devices in zip(costs, placement.layers, strict=True):
        crossings += devices.attention != device_index
        device_index = devices.attention
        if not layer.is_divisible:
            continue
        whole = CPU if devices.granules == 0 else GPU if devices.granules == layer.granules else None
        if whole == device_index:
            continue
        if whole is None or layer.is_moe:
            crossings += 2
        else:
            crossings, device_index = crossings + 1, whole
    return (crossings + (device_index != placement.non_layer.head)) * each / 2
