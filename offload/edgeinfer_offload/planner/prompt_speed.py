"""Prefill speed: each part on its device, or all on the GPU with the CPU's weights streamed to it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil

from edgeinfer_kernels.blocks.common.block_sizes import DivisibleSizes
from edgeinfer_kernels.matrix import MatrixSize
from edgeinfer_kernels.sizes.cuda_buffers import SCRATCH_WEIGHTS
from edgeinfer_kernels.sizes.model_sizes import LayerSizes
from edgeinfer_offload.machine.cost_constants import (
    ATTENTION_PREFILL_SHARE,
    COPY_OVERLAP_LOSS,
    CPU_EXPERT_PREFILL_SHARE,
    EXPERT_BATCH_SECONDS,
    EXPERT_COPY_OVERLAP_LOSS,
    EXPERT_SELECTION_SECONDS,
    LAYER_LAUNCH_SECONDS,
    MOE_LAUNCH_SECONDS,
    STREAMED_LAUNCH_SECONDS,
)
from edgeinfer_offload.planner.layer_costs import LayerCosts
from edgeinfer_offload.planner.placement_problem import PlacementProblem
from edgeinfer_offload.planner.placement_search import CPU, GPU, LayerDevices, Placement
from edgeinfer_offload.planner.roofline import Roofline, Work

MAX_TOKENS = 1 << 16
"""Upper end of the search for `stream_min_tokens`."""
UnpackedRate = Callable[[str], float]
"""Bytes per second at which weights of a format are dequantized to float16 on the GPU."""


@dataclass(frozen=True)
class _Part:
    """Weights that are stored together: bytes, operations per token, and for each of its equal pieces the
    probability that a token uses it. `unpacking`: seconds to dequantize all of it on the GPU if it is
    streamed.
    """

    nbytes: float
    operations: float
    probs: tuple[float, ...] = (1.0,)
    unpacking: float = 0.0
    slowness: float = 1.0
    """How many times as long the same operations take on the CPU in this format."""
    at_once: int = 0
    """MoE: the number of experts computed together on the GPU; 0: not an MoE."""
    pieces: int = 1

    def batches(self, tokens: int) -> int:
        """Number of expert batches that the GPU computes for `tokens` tokens."""
        return ceil(self.share(tokens) * self.pieces / self.at_once) if self.at_once else 0

    def share(self, tokens: int) -> float:
        """Share of the bytes that at least one of `tokens` tokens needs."""
        return sum(1 - (1 - min(prob, 1.0)) ** tokens for prob in self.probs) / len(self.probs)

    def work(self, tokens: int, slowness: float = 1.0) -> Work:
        """Work with each needed weight read once."""
        return Work(slowness * self.operations * tokens, max(self.nbytes * self.share(tokens), 1.0))


@dataclass(frozen=True)
class _Layer:
    """One layer: its parts on either device; CPU bytes per cached position, 0 if the cache is on the GPU."""

    sizes: LayerSizes
    attends_on_gpu: bool
    here: Sequence[_Part]
    there: Sequence[_Part]
    position_bytes: float

    def scores(self, tokens: int, start: int) -> Work:
        """Attention work of a chunk of `tokens` tokens after `start` cached ones."""
        operations = sum(block.state_operations(tokens, start) for block in self.sizes.blocks)
        return Work(operations / ATTENTION_PREFILL_SHARE, 1.0)


class PromptSpeed:
    """Seconds of a prompt under a placement.

    `stream_min_tokens`: prompts of at least this many tokens stream the CPU's weights to the GPU; None:
    never.
    """

    def __init__(self, problem: PlacementProblem, placement: Placement) -> None:
        machine = problem.machine
        processor, graphics, link = machine.processor, problem.pricing.graphics, machine.link
        self._cpu = Roofline(processor.operations_per_second, processor.bytes_per_second)
        self._gpu: Roofline | None = None
        if graphics and placement.uses_gpu:
            self._gpu = Roofline(graphics.operations_per_second, graphics.bytes_per_second)
        self._link = link.to_gpu if link else 0.0
        unpacked = graphics.unpacked_rate if graphics else None
        different: dict[tuple[int, LayerDevices], _Layer] = {}
        self._layers: list[_Layer] = []
        for index, (costs, devices) in enumerate(zip(problem.costs, placement.layers, strict=True)):
            key = id(costs), devices  # Equal layers have the same costs.
            if key not in different:
                different[key] = _layer(problem, index, costs, devices, unpacked)
            self._layers.append(different[key])
        self._different = list(different.values())
        self._is_split = any(layer.here or not layer.attends_on_gpu for layer in self._layers)
        self._is_encoder = problem.sizes.is_encoder
        head = _Part(problem.sizes.head.nbytes, 2 * problem.sizes.head.weights)
        roof = self._gpu if placement.non_layer.head == GPU else self._cpu
        self._head = head.work(1).seconds(roof or self._cpu)
        able = all(layer.attends_on_gpu or not layer.sizes.routed for layer in self._layers)
        self.stream_min_tokens = self._crossover() if problem.buffers.streams and able else None

    def seconds(self, prompt: int, chunk: int, batch: int) -> float:
        """Seconds from the first prompt token to the logits of the last, read in chunks."""
        step = chunk if any(layer.attends_on_gpu for layer in self._layers) else batch
        total, start = self._head, 0
        while start < prompt:
            tokens = min(step, prompt - start)
            streams = self.stream_min_tokens is not None and tokens >= self.stream_min_tokens
            total += self._streamed(tokens, start) if streams else self._in_place(tokens, start)
            start += tokens
        return total

    def _in_place(self, tokens: int, start: int) -> float:
        """Seconds of a chunk, with each part computed on its device."""
        seconds = {id(layer): self._layer_in_place(layer, tokens, start) for layer in self._different}
        return sum(part for layer in self._layers for part in seconds[id(layer)])

    def _layer_in_place(self, layer: _Layer, tokens: int, start: int) -> tuple[float, float]:
        """Seconds of the parts on the CPU, and of the others with the attention."""
        on_cpu = sum(part.work(tokens, part.slowness).seconds(self._cpu) for part in layer.here)
        scores = layer.scores(tokens, start)
        if not layer.attends_on_gpu or self._gpu is None:
            return on_cpu, scores.seconds(self._cpu)
        gpu = self._gpu
        computing = scores.seconds(gpu) + sum(part.work(tokens).seconds(gpu) for part in layer.there)
        return on_cpu, max(computing, self._launching(tokens, layer))

    def _launching(self, tokens: int, layer: _Layer) -> float:
        """Host seconds to launch a layer of a chunk; nothing if the chunk is one CUDA graph."""
        if not self._is_split and not self._is_encoder:
            return 0.0
        return _moe_launches(tokens, layer.there) if layer.sizes.routed else LAYER_LAUNCH_SECONDS

    def _streamed(self, tokens: int, start: int) -> float:
        """Seconds of a chunk computed wholly on the GPU. Copies are overlapped, except those of experts,
        which start after the layer's expert selection.
        """
        seconds = {id(layer): self._streamed_layer(layer, tokens, start) for layer in self._different}
        of_layers = (seconds[id(layer)] for layer in self._layers)
        copying, computing, launching, routed = map(sum, zip(*of_layers, strict=True))
        return _overlapped_seconds(copying, computing, launching) + routed

    def _streamed_layer(self, layer: _Layer, tokens: int, start: int) -> tuple[float, float, float, float]:
        """Seconds of copies, of computing and of launches, which are overlapped, and those of a routed
        layer.
        """
        assert self._gpu is not None
        copied = sum(part.nbytes * part.share(tokens) for part in layer.here) / self._link
        unpacked = sum(part.unpacking * part.share(tokens) for part in layer.here)
        parts = sum(part.work(tokens).seconds(self._gpu) for part in (*layer.here, *layer.there))
        scores = layer.scores(tokens, start).seconds(self._gpu)
        if layer.sizes.routed:
            launched = _moe_launches(tokens, (*layer.here, *layer.there))
            busy = max(copied, unpacked + parts, launched)
            busy += EXPERT_COPY_OVERLAP_LOSS * min(copied, launched)
            return 0.0, 0.0, 0.0, busy + scores + (EXPERT_SELECTION_SECONDS if copied else 0.0)
        copied += layer.position_bytes * (start + tokens) / self._link
        launched = STREAMED_LAUNCH_SECONDS if layer.here else LAYER_LAUNCH_SECONDS
        return copied, unpacked + parts + scores, launched, 0.0

    def _crossover(self) -> int | None:
        """The minimum number of tokens for which streaming is faster than computing on the CPU."""
        if self._gpu is None or not any(layer.here for layer in self._layers):
            return None

        def pays(tokens: int) -> bool:
            return self._streamed(tokens, 0) < self._in_place(tokens, 0)

        if not pays(MAX_TOKENS):
            return None
        low, high = 1, MAX_TOKENS
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if pays(middle) else (middle + 1, high)
        return low


def _overlapped_seconds(*seconds: float) -> float:
    """Seconds of tasks that overlap while weights are streamed."""
    *_, second, longest = sorted(seconds)
    return longest + COPY_OVERLAP_LOSS * second


def _moe_launches(tokens: int, parts: Sequence[_Part]) -> float:
    """Host seconds to launch an MoE layer."""
    return MOE_LAUNCH_SECONDS + EXPERT_BATCH_SECONDS * max(sum(part.batches(tokens) for part in parts) - 1, 0)


def _unpacking(matrices: Sequence[MatrixSize], rate: UnpackedRate | None) -> float:
    """Seconds per byte to dequantize these matrices to float16 on the GPU."""
    nbytes = sum(matrix.nbytes for matrix in matrices)
    return sum(matrix.nbytes / rate(matrix.format) for matrix in matrices) / nbytes if rate else 0.0


def _probs(
    problem: PlacementProblem, index: int, granules: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Probability that a token uses each expert, for the CPU's and the GPU's; the hottest `granules` are on
    the GPU. For a dense feed-forward, all of it.
    """
    block, routing = problem.sizes.layers[index].routed, problem.options.routing
    if block is None:
        return (1.0,), (1.0,)
    if routing is None:
        alike = (block.granules_per_token / block.granules,)
        return alike, alike
    hottest = sorted(routing[index], reverse=True)
    return tuple(hottest[granules:]), tuple(hottest[:granules])


def _host_bytes(problem: PlacementProblem, costs: LayerCosts, granules: int) -> float:
    """Bytes of a feed-forward that the CPU computes, without the copies it holds for the expert cache."""
    nbytes, there = float(costs.cpu_bytes[granules]), costs.granule_neurons[granules]
    expert_cache = problem.options.expert_cache and costs.is_moe and 0 < there < costs.granule_neurons[-1]
    return nbytes * (1 - there / costs.granule_neurons[-1]) if expert_cache else nbytes


def _slowness(matrices: Sequence[MatrixSize], slowness: Callable[[str], float]) -> float:
    """The slowness of several matrices together; `slowness` returns that of a format."""
    return sum(m.weights * slowness(m.format) for m in matrices) / sum(m.weights for m in matrices)


def _layer(
    problem: PlacementProblem,
    index: int,
    costs: LayerCosts,
    devices: LayerDevices,
    unpacked: UnpackedRate | None,
) -> _Layer:
    """The parts of layer `index` on the CPU and on the GPU."""
    layer = problem.sizes.layers[index]
    parts_by_device: tuple[list[_Part], list[_Part]] = ([], [])
    always = [matrix for each in layer.blocks for matrix in each.undivided()]
    own = costs.attention[devices.attention]
    shared = costs.always[devices.attention] if costs.always else None
    nbytes = sum(cost.nbytes for cost in (own, shared) if cost)
    operations, slow = 2.0 * sum(matrix.weights for matrix in always), problem.machine.processor.slowness
    if always:
        unpacking = nbytes * _unpacking(always, unpacked)
        alike = _slowness(always, slow)
        parts_by_device[devices.attention].append(_Part(nbytes, operations, (1.0,), unpacking, alike))
    block = layer.divisible
    if block is not None:
        _add_granules(problem, index, costs, devices, unpacked, block, parts_by_device)
    cached = problem.buffers.context_bytes_of(layer) / problem.options.context
    attends = devices.attention == GPU
    return _Layer(layer, attends, parts_by_device[CPU], parts_by_device[GPU], 0.0 if attends else cached)


def _add_granules(
    problem: PlacementProblem,
    index: int,
    costs: LayerCosts,
    devices: LayerDevices,
    unpacked: UnpackedRate | None,
    block: DivisibleSizes,
    parts_by_device: tuple[list[_Part], list[_Part]],
) -> None:
    """Add the units of a divisible block on the CPU and on the GPU."""
    matrices, total = block.granule_matrices(), block.granules
    share = costs.granule_neurons[devices.granules] / total
    weights = sum(matrix.weights for matrix in matrices) * (
        block.granules_per_token if block.is_routed else 1
    )
    byte_unpacking, at_once = _unpacking(matrices, unpacked), 0
    slowness = _slowness(matrices, problem.machine.processor.slowness)
    if block.is_routed:
        slowness /= CPU_EXPERT_PREFILL_SHARE
        at_once = max(SCRATCH_WEIGHTS // max(matrix.weights for matrix in matrices), 1)
    probs = _probs(problem, index, devices.granules)
    shards = (
        (_host_bytes(problem, costs, devices.granules), 1 - share),
        (costs.gpu_bytes[devices.granules], share),
    )
    for parts, (nbytes, part), touched in zip(parts_by_device, shards, probs, strict=True):
        if nbytes:
            pieces, operations = round(part * total), 2 * weights * part
            unpacking = float(nbytes) * byte_unpacking
            parts.append(_Part(float(nbytes), operations, touched, unpacking, slowness, at_once, pieces))
