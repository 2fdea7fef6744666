"""Bytes and seconds of each part of a layer on each device; seconds come from measured rates."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.blocks.common.block_sizes import BlockSizes, DivisibleSizes
from edgeinfer_kernels.caches.cache_types import is_for_cpu
from edgeinfer_kernels.cpu.layout.packed_matrix import interleaved_bytes
from edgeinfer_kernels.cuda.weights.plane_formats import UnsupportedOnDeviceError
from edgeinfer_kernels.matrix import MatrixSize
from edgeinfer_kernels.sizes import cuda_matrices
from edgeinfer_kernels.sizes.model_sizes import LayerSizes
from edgeinfer_offload.machine.cost_constants import (
    ATTENTION_LAUNCHES,
    CPU_EXPERT_DECODE_SHARE,
    CPU_EXPERTS_SECONDS,
    FEED_FORWARD_LAUNCHES,
    GATHERED_LAUNCHES,
    GPU_EXPERTS_SECONDS,
    GPU_SCATTERED_SLOWDOWN,
    MAPPED_SLOWDOWN,
    ROUTER_SECONDS,
    SCATTERED_SLOWDOWN,
    SPARSE_BLOCKS,
)
from edgeinfer_offload.machine.hardware import Graphics, Machine
from edgeinfer_offload.planner.plan_types import PlanOptions
from edgeinfer_offload.planner.sparse_types import SparseLayer, SparseOptions

Array = npt.NDArray[np.float64]


def _file_bytes(matrix: MatrixSize) -> int:
    return matrix.nbytes


@dataclass(frozen=True)
class Cost:
    """Bytes of a part, and its seconds per token; `None` instead of it: the device can't run the part."""

    nbytes: int
    seconds: float
    reading: float
    """The part of `seconds` spent on reading; the rest is startup."""


class Pricing:
    """Cost functions of a machine for one plan: cache depth, cache type, and allowed devices."""

    def __init__(self, machine: Machine, options: PlanOptions, use_gpu: bool) -> None:
        self.machine = machine
        self.kv = options.kv
        self.context, self.sequences = options.context, options.sequences
        self.depth = options.planned_depth
        self.repack = options.repack
        self.expert_cache = options.expert_cache
        self.graphics: Graphics | None = machine.graphics if use_gpu else None
        self.sync_seconds = machine.link.sync_seconds if machine.link else 0.0

    def on_cpu(self, matrices: Iterable[MatrixSize]) -> Cost:
        """Matrices as one block: in the interleaved layout, or memory-mapped."""
        rate, count = self.machine.processor.rate, interleaved_bytes if self.repack else _file_bytes
        sizes = [(count(matrix), rate(matrix.format)) for matrix in matrices]
        reading = sum(nbytes / each for nbytes, each in sizes) * (1 if self.repack else MAPPED_SLOWDOWN)
        return Cost(
            sum(nbytes for nbytes, _ in sizes), reading + self.machine.processor.block_seconds, reading
        )

    def sparse_on_cpu(self, layer: SparseLayer, down: MatrixSize) -> Cost:
        """A sparse feed-forward with its predictor; `down` determines the format, and thus the rate."""
        scattering = (SCATTERED_SLOWDOWN - 1) * layer.scattered
        reading = (layer.read + scattering + layer.predictor) / self.machine.processor.rate(down.format)
        starting = SPARSE_BLOCKS * self.machine.processor.block_seconds
        waiting = self.machine.disk.seconds(layer.disk_reads, layer.disk_read_bytes)
        return Cost(layer.held + layer.predictor, reading + starting + waiting, reading + waiting)

    def on_gpu(self, matrices: Iterable[MatrixSize], count: Callable[[], int], launches: int) -> Cost | None:
        """Matrices in planes; `count` returns all bytes of the part. None: no GPU, or no kernel for it."""
        if self.graphics is None:
            return None
        try:
            nbytes = count()
            reading = sum(cuda_matrices.matrix_bytes(m) / self.graphics.rate(m.format) for m in matrices)
        except UnsupportedOnDeviceError:
            return None
        return Cost(nbytes, reading + launches * self.graphics.launch_seconds, reading)

    def gathered_on_gpu(self, layer: SparseLayer, dense: Cost, down: MatrixSize) -> Cost:
        """A feed-forward of which the GPU reads the active neurons, in as many bytes as a `dense` one."""
        assert self.graphics is not None
        scattering = (GPU_SCATTERED_SLOWDOWN - 1) * layer.scattered
        reading = (layer.read + scattering) / self.graphics.rate(down.format)
        starting = GATHERED_LAUNCHES * self.graphics.launch_seconds
        return Cost(dense.nbytes, reading + starting, reading)

    def state_on_cpu(self, layer: LayerSizes, depth: int | None = None) -> Cost:
        """The state of one layer, such as its keys and values; the time is that of one sequence."""
        nbytes = self.sequences * sum(block.state_bytes(self.context, self.kv) for block in layer.blocks)
        reading = self.state_bytes_read(layer, on_gpu=False, depth=depth) / self.machine.processor.cache_rate
        return Cost(nbytes, reading, reading)

    def state_on_gpu(self, layer: LayerSizes, depth: int | None = None) -> Cost | None:
        """As `state_on_cpu`, on the GPU; None: it can't hold the state."""
        if self.graphics is None or is_for_cpu(self.kv):
            return None
        nbytes, reading = 0, 0.0
        for block in layer.blocks:
            nbytes += block.states_device_bytes(self.context, self.sequences, self.kv)
            whole, as_f16 = (block.read_state_device_bytes(self.context, kv) for kv in (self.kv, "f16"))
            reading += self._read_share(block, depth) * self.graphics.cache_seconds(whole, as_f16)
        return Cost(nbytes, reading, reading)

    def state_bytes_read(self, layer: LayerSizes, *, on_gpu: bool, depth: int | None = None) -> float:
        """Bytes of the state of one layer that a token reads or writes."""
        read = 0.0
        for block in layer.blocks:
            count = block.read_state_device_bytes if on_gpu else block.read_state_bytes
            read += self._read_share(block, depth) * count(self.context, self.kv)
        return read

    def _read_share(self, block: BlockSizes, depth: int | None) -> float:
        """Share of the state that a token reads or writes."""
        seen = min(self.depth if depth is None else depth, self.context)
        return block.state_share(seen, self.context)


@dataclass(frozen=True)
class LayerCosts:
    """Costs of a layer's parts on either device; GPU costs are None if the GPU can't run the part.

    The feed-forward is divided into `granules`: groups of neurons, or experts, hottest first. The arrays of
    bytes and seconds have at index u the costs on their device if u granules are on the GPU.
    """

    attention: tuple[Cost, Cost | None]
    cache: tuple[Cost, Cost | None]
    always: tuple[Cost, Cost | None] | None
    """MoE only: the router and the shared expert, which run on the device of the attention."""
    granule_neurons: tuple[int, ...]
    """Number of neurons (or experts) on the GPU for each number of granules, from 0."""
    cpu_bytes: Array
    cpu_seconds: Array
    gpu_bytes: Array
    gpu_seconds: Array
    cpu_reading: Array
    gpu_reading: Array
    is_moe: bool
    is_joined: bool
    """Whether the sum of the granules is added on the device of the attention, also if that has none."""
    file_bytes: int
    """Bytes of the whole feed-forward in the file."""
    is_divisible: bool = True
    """Whether the layer has a feed-forward."""
    gathers: tuple[bool, ...] = ()
    """For each number of granules on the GPU, whether it reads only the active neurons of them."""

    @property
    def granules(self) -> int:
        """Maximum number of granules on the GPU; 0: none."""
        return len(self.granule_neurons) - 1

    @cached_property
    def gpu_can_attend(self) -> bool:
        return self.attention[1] is not None and (self.always is None or self.always[1] is not None)


def layer_costs(
    layers: Sequence[LayerSizes],
    pricing: Pricing,
    routing: Sequence[Sequence[float]] | None,
    sparse: SparseOptions,
) -> list[LayerCosts]:
    """The costs of every layer; equal layers are computed once. `routing`, `sparse`: see `PlanOptions`."""

    @cache
    def priced(layer: LayerSizes, probs: tuple[float, ...] | None, by_neuron: ByNeuron) -> LayerCosts:
        return _layer(layer, pricing, probs, by_neuron)

    return [
        priced(
            layer,
            tuple(routing[index]) if routing and layer.routed else None,
            ByNeuron(sparse.layers.get(index), sparse.gathered.get(index)),
        )
        for index, layer in enumerate(layers)
    ]


class ByNeuron(NamedTuple):
    """The sparse part of a layer on the CPU, and on the GPU; None: it is dense."""

    cpu: SparseLayer | None
    gpu: SparseLayer | None


def _layer(
    layer: LayerSizes, pricing: Pricing, probs: tuple[float, ...] | None, by_neuron: ByNeuron
) -> LayerCosts:
    undivided, block = layer.undivided, layer.divisible
    always = None
    if block is not None and (matrices := block.undivided()):
        there = pricing.on_gpu(matrices, block.undivided_device_bytes, FEED_FORWARD_LAUNCHES)
        replicated = block.replicated()
        always = (
            pricing.on_cpu([m for m in matrices if not any(m is each for each in replicated)]),
            there and replace(there, seconds=there.seconds + ROUTER_SECONDS),
        )
    neurons, cpu, gpu, gathers = _granules(block, pricing, probs, by_neuron)

    def column(costs: Sequence[Cost], name: str) -> Array:
        return np.array([getattr(cost, name) for cost in costs], np.float64)

    def undivided_bytes() -> int:
        """The vectors of a block whose granules are routed are stored once, with the undivided blocks."""
        return sum(each.undivided_device_bytes() for each in undivided) + (
            cuda_matrices.vector_bytes(block.undivided_vectors()) if block is not None else 0
        )

    matrices = [matrix for each in undivided for matrix in each.undivided()]
    return LayerCosts(
        attention=(
            pricing.on_cpu(matrices),
            pricing.on_gpu(matrices, undivided_bytes, ATTENTION_LAUNCHES if undivided else 0),
        ),
        cache=(pricing.state_on_cpu(layer), pricing.state_on_gpu(layer)),
        always=always,
        granule_neurons=tuple(neurons),
        cpu_bytes=column(cpu, "nbytes"),
        cpu_seconds=column(cpu, "seconds"),
        gpu_bytes=column(gpu, "nbytes"),
        gpu_seconds=column(gpu, "seconds"),
        cpu_reading=column(cpu, "reading"),
        gpu_reading=column(gpu, "reading"),
        is_moe=block is not None and block.is_routed,
        is_joined=block is not None and block.is_joined,
        file_bytes=0 if block is None else block.file_bytes,
        is_divisible=block is not None,
        gathers=tuple(gathers),
    )


NOTHING = Cost(0, 0.0, 0.0)
_Divided = tuple[list[int], list[Cost], list[Cost], list[bool]]


def _granules(
    block: DivisibleSizes | None,
    pricing: Pricing,
    probs: tuple[float, ...] | None,
    by_neuron: ByNeuron,
) -> _Divided:
    """Neurons on the GPU, CPU cost and GPU cost of a divisible block, and whether the GPU gathers active
    neurons, by the number of granules there.
    """
    if block is None:
        return [0], [NOTHING], [NOTHING], [False]
    if not block.is_routed:
        return _dense(block, pricing, by_neuron)
    counts, cpu, gpu = _routed(block, pricing, probs, by_neuron.cpu)
    return counts, cpu, gpu, [False] * len(counts)


def _dense(block: DivisibleSizes, pricing: Pricing, by_neuron: ByNeuron) -> _Divided:
    """As `_granules`, of a block of which a token reads all granules."""
    whole, counts = block.granules, block.granule_counts()
    cpu, gpu, gathers = [], [], []
    for count in counts:
        hot, cold, down = block.part(count), block.part(whole - count), block.granule_matrices()[-1]
        there, gathered = NOTHING, NOTHING
        if count:
            cost = pricing.on_gpu(hot.granule_matrices(), hot.granules_device_bytes, FEED_FORWARD_LAUNCHES)
            if cost is None:
                break
            there = gathered = cost
            if by_neuron.gpu:
                gathered = pricing.gathered_on_gpu(by_neuron.gpu.hot(count, whole), cost, down)
        gathers.append(gathered.seconds < there.seconds)
        gpu.append(gathered if gathers[-1] else there)
        if count == whole:
            cpu.append(NOTHING)
        elif by_neuron.cpu:
            cpu.append(pricing.sparse_on_cpu(by_neuron.cpu.cold(count, whole), down))
        else:
            cpu.append(pricing.on_cpu(cold.granule_matrices()))
    return counts[: len(gpu)], cpu, gpu, gathers


def _routed(
    block: DivisibleSizes,
    pricing: Pricing,
    probs: tuple[float, ...] | None,
    by_neuron: SparseLayer | None,
) -> tuple[list[int], list[Cost], list[Cost]]:
    """As `_granules`, of a block of which a token reads the granules that a router selects, hottest first.
    `probs`: usage probability of each; None: uniform. The CPU's part has the matrices that are replicated.
    """
    matrices, total = block.granule_matrices(), block.granules
    one_here = pricing.sparse_on_cpu(by_neuron, matrices[-1]) if by_neuron else pricing.on_cpu(matrices)
    one_there = pricing.on_gpu(matrices, block.granules_device_bytes, FEED_FORWARD_LAUNCHES)
    expert_probs = np.full(total, block.granules_per_token / total) if probs is None else np.sort(probs)[::-1]
    with_experts = pricing.on_cpu(block.replicated()) if block.replicated() else NOTHING
    hits = np.concatenate([[0.0], np.cumsum(expert_probs)])
    counts = list(range(total + 1)) if one_there else [0]
    cpu, gpu = [], []
    for count in counts:
        missed = float(hits[-1] - hits[count]) * one_here.reading / CPU_EXPERT_DECODE_SHARE
        held = total if count and pricing.expert_cache else total - count
        reading = missed + with_experts.reading
        seconds = missed + with_experts.seconds + CPU_EXPERTS_SECONDS
        nbytes = held * one_here.nbytes + with_experts.nbytes
        cpu.append(Cost(nbytes, seconds, reading) if count < total else NOTHING)
        if count == 0 or one_there is None:
            gpu.append(NOTHING)
            continue
        hit = float(hits[count]) * one_there.reading
        starting = one_there.seconds - one_there.reading + GPU_EXPERTS_SECONDS
        gpu.append(Cost(count * one_there.nbytes, hit + starting, hit))
    return counts, cpu, gpu
