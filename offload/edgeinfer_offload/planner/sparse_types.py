"""Sparse layers of a plan: what a token reads of them, in memory and from a bundle file."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from edgeinfer_kernels.blocks.feed_forward import NEURON_GROUP
from edgeinfer_offload.machine.cost_constants import WINDOW_HIT_SHARE

READ_ITERATIONS = 8
"""Steps of the iteration that finds how many neurons a token reads."""
MIN_WINDOW_SLOTS = 64
"""Neurons of a layer that a window holds at least: two blocks."""


@dataclass(frozen=True)
class SparseLayer:
    """Bytes of a feed-forward, or of one expert, of which a token reads only the active neurons.

    - `held`: bytes in memory, by neuron or whole. `predictor`: also in memory, and read whole.
    - `read`: bytes of `held` that a token reads; `scattered`: the non-sequential part of them.
    - `in_file`: bytes of what is stored by neuron that are also memory-mapped, for long steps.
    - `activity`: the share of a token's active neurons in the first n groups of NEURON_GROUP, n = 0…; empty:
      proportional to the number of neurons.
    - `disk_reads`: neurons that a token reads from the disk, each `disk_read_bytes`.
    """

    held: int
    read: int
    scattered: int
    predictor: int
    in_file: int
    activity: tuple[float, ...] = ()
    disk_reads: float = 0.0
    disk_read_bytes: int = 0

    def cold(self, hot: int, neurons: int) -> "SparseLayer":
        """The rest of `neurons` if the first `hot` are elsewhere, in whole groups; the predictor remains."""
        left = 1 - hot / neurons
        active = 1 - self.activity[hot // NEURON_GROUP] if self.activity and hot < neurons else left
        scattered = round(self.scattered * active)
        return SparseLayer(
            round(self.held * left),
            round((self.read - self.scattered) * left) + scattered,
            scattered,
            self.predictor,
            round(self.in_file * left),
            disk_reads=self.disk_reads,
            disk_read_bytes=self.disk_read_bytes,
        )

    def hot(self, hot: int, neurons: int) -> "SparseLayer":
        """The first `hot` of `neurons`, in whole groups."""
        share = hot / neurons
        scattered = round(self.scattered * (self.activity[hot // NEURON_GROUP] if self.activity else share))
        read = round((self.read - self.scattered) * share) + scattered
        return SparseLayer(round(self.held * share), read, scattered, 0, round(self.in_file * share))

    def of_experts(self, count: int) -> "SparseLayer":
        """That many experts, of which a token reads this share each."""
        held, read, scattered = (count * nbytes for nbytes in (self.held, self.read, self.scattered))
        return SparseLayer(held, read, scattered, count * self.predictor, count * self.in_file)


@dataclass(frozen=True)
class SparseOptions:
    """The sparse layers, and the memory that they share: once per model, and once per thread. `has_experts`:
    some are experts. Those have no expert cache, because it copies whole rows. `gathered`: layers of which a
    GPU may read only the active neurons of its part, found by an exact gate.
    """

    layers: Mapping[int, SparseLayer]
    shared_bytes: int
    thread_bytes: int
    has_experts: bool = False
    gathered: Mapping[int, SparseLayer] = field(default_factory=dict)
    window_slots: int = 0
    """Neurons of each layer in memory, the others being on disk; 0: all are in memory."""


@dataclass(frozen=True)
class BundledLayer:
    """A sparse layer whose neurons are on disk, with a window of them in memory.

    - `sparse`: the layer with all neurons in memory. `resident`: bytes in memory besides the window and the
      predictor; `slot_bytes`: of each neuron in the window; `read_bytes`: of the read of a neuron.
    - `named`: the share of its neurons that a token needs. `cover`: the share of these that the hottest
      n/(length - 1) of all neurons have, n = 0…; empty: proportional to the number of neurons.
    """

    sparse: SparseLayer
    resident: int
    slot_bytes: int
    read_bytes: int
    neurons: int
    named: float
    cover: tuple[float, ...] = ()

    def with_slots(self, slots: int) -> SparseLayer:
        """The layer with a window of `slots` neurons."""
        held = min(slots, self.neurons)
        return replace(
            self.sparse,
            held=self.resident + held * self.slot_bytes,
            disk_reads=self._reads(held),
            disk_read_bytes=self.read_bytes,
        )

    def _reads(self, slots: int) -> float:
        """Neurons that a token reads: its own but for those among the hottest. On average half of those that
        are read are in slots that would otherwise have hot ones.
        """
        needed = self.named * self.neurons
        if slots >= self.neurons or slots < needed:
            return 0.0 if slots >= self.neurons else needed
        reads = needed
        for _ in range(READ_ITERATIONS):
            hits = WINDOW_HIT_SHARE * self._covered(max(0.0, slots - reads / 2))
            reads = (reads + needed * (1 - hits)) / 2
        return reads

    def _covered(self, slots: float) -> float:
        """The share of active neurons among the hottest `slots`."""
        if not self.cover:
            return slots / self.neurons
        position = slots / self.neurons * (len(self.cover) - 1)
        first = min(int(position), len(self.cover) - 2)
        return self.cover[first] + (position - first) * (self.cover[first + 1] - self.cover[first])


@dataclass(frozen=True)
class BundledOptions:
    """The sparse layers of a bundle file, and the memory that they share, as in `SparseOptions`."""

    layers: Mapping[int, BundledLayer]
    shared_bytes: int
    thread_bytes: int

    @property
    def max_slots(self) -> int:
        """Neurons of the largest layer."""
        return max(layer.neurons for layer in self.layers.values())

    def slots_in(self, nbytes: int) -> int:
        """The largest windows that fit `nbytes`; those of small layers count as larger than they are."""
        return min(self.max_slots, nbytes // sum(layer.slot_bytes for layer in self.layers.values()))

    def with_slots(self, slots: int) -> SparseOptions:
        """The sparse layers with windows of `slots` neurons."""
        layers = {index: layer.with_slots(slots) for index, layer in self.layers.items()}
        return SparseOptions(layers, self.shared_bytes, self.thread_bytes, window_slots=slots)
