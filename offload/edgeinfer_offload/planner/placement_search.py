"""Search for the placement with the fastest decoding within a memory budget.

Activations pass through the layers once and move between devices where adjacent parts are on different ones,
so the cost of a layer depends on the device of its input. The search starts with all layers on the CPU. It
repeats the move of one layer that saves the most time per byte of GPU memory (value density) while one fits,
then exchanges: the best pair of a move that frees memory and one that uses it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgeinfer_offload.machine.cost_constants import OVERLAP_LOSS
from edgeinfer_offload.planner.layer_costs import Array, LayerCosts

CPU, GPU = 0, 1
DEVICE_INDICES = (CPU, GPU)
MAX_PAIRS = 8
"""Number of promising exchanges whose exact cost is computed before the search ends."""
MIN_GAIN_SECONDS = 1e-9
UNFIT_SECONDS_PER_BYTE = 1.0
"""Price of a byte that main memory must hold but can't; only during the search."""
Indices = npt.NDArray[np.int64]


class LayerDevices(NamedTuple):
    """The devices of one layer: `attention` and the cache that it reads are on one device; `granules` of the
    feed-forward are on the GPU, 0 if the attention isn't.
    """

    attention: int
    granules: int = 0


class LayerTables:
    """Seconds and bytes of every option of every layer, shape (layer, option).

    Option 0: all on the CPU. Option 1 + u: attention and u granules on the GPU. `seconds[device_index]`: with
    the input on that device; infinite if impossible. `out`: the device of the output.
    """

    def __init__(self, costs: Sequence[LayerCosts], sync_seconds: float) -> None:
        shape = len(costs), 2 + max((cost.granules for cost in costs), default=0)
        own = np.full(shape, np.inf)
        self.gpu_bytes, self.cpu_bytes = np.zeros(shape), np.zeros(shape)
        self.out = np.full(shape, CPU)
        for layer, cost in enumerate(costs):
            self._fill(layer, cost, sync_seconds, own)
        crossing = np.full(shape[1], sync_seconds / 2)
        crossing[0] = 0.0
        self.seconds = np.stack([own + crossing, own + (sync_seconds / 2 - crossing)])

    def _fill(self, layer: int, costs: LayerCosts, sync_seconds: float, own: Array) -> None:
        end = 2 + costs.granules
        for device_index, at in ((CPU, slice(0, 1)), (GPU, slice(1, end))):
            fixed = [costs.attention[device_index], costs.cache[device_index]]
            fixed += [costs.always[device_index]] if costs.always else []
            held = [cost for cost in fixed if cost]
            if len(held) < len(fixed):
                continue
            granules = slice(0, 1) if device_index == CPU else slice(0, end - 1)
            seconds, self.out[layer, at] = _feed_forward(costs, device_index, sync_seconds)
            own[layer, at] = seconds[granules] + sum(cost.seconds for cost in held)
            nbytes = sum(cost.nbytes for cost in held)
            self.cpu_bytes[layer, at] = costs.cpu_bytes[granules] + (nbytes if device_index == CPU else 0)
            self.gpu_bytes[layer, at] = costs.gpu_bytes[granules] + (nbytes if device_index == GPU else 0)


def _feed_forward(costs: LayerCosts, device_index: int, sync_seconds: float) -> tuple[Array, Indices]:
    """Seconds of the feed-forward after attention on device `device_index` without what always runs there,
    and the device of the output; both by the number of granules on the GPU.

    Both shards overlap. The cost is the slower one, the overlap loss of the other, and one synchronization.
    A dense feed-forward wholly on the other device moves the activations there; an MoE joins at its router,
    a feed-forward in parallel with attention before that.
    """
    if device_index == CPU or not costs.is_divisible:
        return costs.cpu_seconds[:1], np.array([device_index])
    here, there = costs.gpu_seconds, costs.cpu_seconds
    seconds = np.maximum(here, there) + OVERLAP_LOSS * np.minimum(here, there)
    out = np.full(len(seconds), GPU)
    split = np.arange(len(seconds)) < max(costs.granules, 1)
    seconds = seconds + sync_seconds * split
    if not costs.is_joined:
        seconds[0], out[0] = there[0] + sync_seconds / 2, CPU
    return seconds, out


@dataclass(frozen=True)
class NonLayerPlacement:
    """Parts outside the layers (embedding and output), with their bytes and costs."""

    head: int
    embedding: int
    draft: int | None
    seconds: float
    gpu_bytes: float
    cpu_bytes: float
    per_layer_on_gpu: bool = False
    """Whether the table of per-layer embeddings is on the GPU; else its rows are read from the file."""


@dataclass(frozen=True)
class Placement:
    """A candidate: the devices of its layers and its `NonLayerPlacement`; `seconds` per token, including
    the disk.
    """

    layers: tuple[LayerDevices, ...]
    non_layer: NonLayerPlacement
    seconds: float
    gpu_bytes: float
    cpu_bytes: float

    @property
    def uses_gpu(self) -> bool:
        return self.non_layer.gpu_bytes > 0 or any(layer.attention == GPU for layer in self.layers)


@dataclass(frozen=True)
class Budget:
    """Memory limits. `gpu_fixed`: bytes that any use of the GPU takes besides the items; `cpu_fixed`
    likewise.

    `disk_seconds_per_byte`: seconds per token for a byte that main memory can't hold; infinite: it must hold
    all.
    """

    gpu_bytes: float
    cpu_bytes: float
    gpu_fixed: float
    cpu_fixed: float
    disk_seconds_per_byte: float

    @property
    def gpu_room(self) -> float:
        """Bytes for the items on the GPU."""
        return self.gpu_bytes - self.gpu_fixed

    def missing(self, cpu_bytes: Array | float) -> Array:
        """Bytes that main memory can't hold."""
        return np.maximum(np.asarray(cpu_bytes) + self.cpu_fixed - self.cpu_bytes, 0.0)

    def penalty(self, cpu_bytes: float) -> float:
        """Seconds per token of waiting for the disk."""
        missing = float(self.missing(cpu_bytes))
        return missing * self.disk_seconds_per_byte if missing else 0.0


class _Moves:
    """A placement of all layers, one option each, and the effect of every move of one layer to an option.

    `gains`: seconds saved, minus infinity if impossible; `bytes`: additional bytes on the GPU; both (layer,
    option). `saved`: the sum of the gains of the moves so far.
    """

    def __init__(self, search: "Search", non_layer: NonLayerPlacement, budget: Budget, attend: bool) -> None:
        """Begin with all layers on the CPU; with `attend`, with all attention on the GPU."""
        self._search, self.non_layer, self._budget, self._attend = search, non_layer, budget, attend
        self._layers = np.arange(len(search.tables.out))
        self.saved = 0.0
        self.set(np.full(len(self._layers), int(attend)))

    def set(self, options: Indices) -> None:
        """Place all layers."""
        tables, layers, budget = self._search.tables, self._layers, self._budget
        self.options = options
        out = tables.out[layers, options]
        before = np.concatenate([[self.non_layer.embedding], out[:-1]])
        following = np.zeros((len(DEVICE_INDICES), len(layers)))
        following[:, :-1] = tables.seconds[:, layers[1:], options[1:]]
        following[1 - self.non_layer.head, -1] = self._search.sync_seconds / 2
        seconds = tables.seconds[before, layers] + following[tables.out, layers[:, None]]
        cpu_bytes = tables.cpu_bytes - tables.cpu_bytes[layers, options][:, None]
        cpu_bytes += self.non_layer.cpu_bytes + tables.cpu_bytes[layers, options].sum()
        seconds += min(budget.disk_seconds_per_byte, UNFIT_SECONDS_PER_BYTE) * budget.missing(cpu_bytes)
        self.gains = seconds[layers, options][:, None] - seconds
        self.bytes = tables.gpu_bytes - tables.gpu_bytes[layers, options][:, None]
        self.room = budget.gpu_room - self.non_layer.gpu_bytes - tables.gpu_bytes[layers, options].sum()
        on_gpu = options > 0
        if self._attend:
            self.gains[:, 0] = -np.inf
        elif on_gpu.sum() == 1:
            self.gains[on_gpu, 0] = -np.inf  # a lone output matrix on the GPU needs no synchronization

    def greedy(self) -> None:
        """Repeat the move with the most seconds saved per byte, of layers near the head first, while one
        fits. The first layer on the GPU may save nothing.
        """
        while True:
            fits = (self.bytes <= self.room) & (self.gains > -np.inf)
            if self.options.any():
                fits &= self.gains > MIN_GAIN_SECONDS
            fits[self._layers, self.options] = False
            if not fits.any():
                return
            density = np.where(fits, self.gains / np.maximum(self.bytes, 1.0), -np.inf)
            last = density.size - 1 - int(np.argmax(density.ravel()[::-1]))
            self._move(last)

    def exchange(self) -> bool:
        """Apply two moves, one that frees memory and one that uses it; False: no pair saves time.

        The gains of two moves add up unless their layers are adjacent, so the sum is checked.
        """
        gains, nbytes = self.gains.ravel(), self.bytes.ravel()
        frees = np.flatnonzero((nbytes < 0) & (gains > -np.inf))
        uses = np.flatnonzero((nbytes > 0) & (gains > MIN_GAIN_SECONDS))
        if not len(frees) or not len(uses):
            return False
        uses = uses[np.argsort(nbytes[uses], kind="stable")]
        best = np.maximum.accumulate(gains[uses])
        count = np.searchsorted(nbytes[uses], self.room - nbytes[frees], side="right")
        sums = np.where(count > 0, gains[frees] + best[count - 1], -np.inf)
        for index in np.argsort(-sums)[:MAX_PAIRS]:
            if sums[index] <= MIN_GAIN_SECONDS:
                return False
            fitting = uses[: count[index]]
            if self._exchanged(int(frees[index]), int(fitting[np.argmax(gains[fitting])])):
                return True
        return False

    def _exchanged(self, freeing: int, using: int) -> bool:
        options, saved = self.options, self.saved
        if freeing // self.gains.shape[1] == using // self.gains.shape[1]:
            return False
        self._move(freeing)
        self._move(using)
        if self.saved > saved + MIN_GAIN_SECONDS and self.room >= 0:
            return True
        self.saved = saved
        self.set(options)
        return False

    def _move(self, flat: int) -> None:
        layer, option = divmod(flat, self.gains.shape[1])
        self.saved += self.gains[layer, option]
        options = self.options.copy()
        options[layer] = option
        self.set(options)


class Search:
    """Finds placements of one model on one machine; `best` selects by budget."""

    def __init__(
        self, costs: Sequence[LayerCosts], non_layer: Sequence[NonLayerPlacement], sync_seconds: float
    ) -> None:
        self.tables, self.sync_seconds = LayerTables(costs, sync_seconds), sync_seconds
        self.non_layer = non_layer

    def best(self, budget: Budget, attend: bool = False) -> Placement | None:
        """The fastest placement found that uses the GPU within the budget; None: there is none. `attend`:
        with all attention on the GPU, which must be possible.
        """
        candidates = [
            each for non_layer in self.non_layer if (each := self._improved(non_layer, budget, attend))
        ]
        return min(candidates, key=lambda placement: placement.seconds, default=None)

    def _improved(self, non_layer: NonLayerPlacement, budget: Budget, attend: bool) -> Placement | None:
        moves = _Moves(self, non_layer, budget, attend)
        moves.greedy()
        while moves.exchange():
            moves.greedy()
        if moves.room < 0 or not moves.options.any():
            return None
        layers = [LayerDevices(GPU, int(at) - 1) if at else LayerDevices(CPU) for at in moves.options]
        placement = self.placement(layers, non_layer)
        seconds = placement.seconds + budget.penalty(placement.cpu_bytes)
        return replace(placement, seconds=seconds) if seconds < float("inf") else None

    def placement(self, layers: Sequence[LayerDevices], non_layer: NonLayerPlacement) -> Placement:
        """A placement with its cost, computed as in the search."""
        seconds, gpu_bytes, cpu_bytes, device_index = (
            non_layer.seconds,
            non_layer.gpu_bytes,
            non_layer.cpu_bytes,
            non_layer.embedding,
        )
        for index, layer in enumerate(layers):
            at = index, 1 + layer.granules if layer.attention == GPU else 0
            seconds += float(self.tables.seconds[device_index, *at])
            gpu_bytes += float(self.tables.gpu_bytes[at])
            cpu_bytes += float(self.tables.cpu_bytes[at])
            device_index = int(self.tables.out[at])
        seconds += self.sync_seconds / 2 if device_index != non_layer.head else 0.0
        return Placement(tuple(layers), non_layer, seconds, gpu_bytes, cpu_bytes)
