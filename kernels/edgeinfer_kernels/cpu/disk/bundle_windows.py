"""Windows of bundles: layers whose neurons are read from a file when they are active."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from edgeinfer_kernels.blocks.feed_forward import FeedForwardWeights
from edgeinfer_kernels.cpu.compiler.kernel_cache import Kernels
from edgeinfer_kernels.cpu.disk.bundle_layout import BundleLayout
from edgeinfer_kernels.cpu.disk.disk_reader import DiskReader
from edgeinfer_kernels.cpu.layout.packed_matrix import Arena, address
from edgeinfer_kernels.cpu.runtime.disk_args import BundleWindowArgs
from edgeinfer_kernels.pages import Bytes, allocate

SLOT_BOOKKEEPING = 4 + 4 + 8
NEURON_BOOKKEEPING = 4


@dataclass(frozen=True)
class LayerBundles:
    """Where a layer's bundles are in their file, and the factors of its down projection."""

    offset: int
    factors: Bytes


@dataclass(frozen=True)
class Bundles:
    """A file of bundles, its layers, and how many bundles of each layer are held in memory."""

    path: Path
    layers: Mapping[int, LayerBundles]
    slots: int


def window_bytes(layout: BundleLayout, slots: int, *, predicted: bool) -> int:
    """Bytes in memory of a layer's window, with the factors of down."""
    slot = layout.read_bytes(predicted=predicted) + SLOT_BOOKKEEPING
    return layout.factor_bytes + NEURON_BOOKKEEPING * layout.neurons + slots * slot


@dataclass(frozen=True)
class Window:
    """The window of a layer; `memory`: the address of its first slot."""

    layout: BundleLayout
    args: BundleWindowArgs
    address: int
    factors: int

    @property
    def slots(self) -> int:
        """The address of the slot of each neuron."""
        return int(self.args.slots)

    @property
    def memory(self) -> int:
        return int(self.args.memory)

    @property
    def slot_bytes(self) -> int:
        return int(self.args.slot_bytes)


class BundleWindows:
    """The windows of the layers of a file, and its reader."""

    def __init__(self, bundles: Bundles, kernels: Kernels, arena: Arena) -> None:
        self._bundles, self._arena = bundles, arena
        self.reader = DiskReader(bundles.path, kernels)
        self.windows: dict[int, Window] = {}

    def add(self, layer: int, weights: FeedForwardWeights, *, predicted: bool) -> Window:
        """The window of a layer, without any bundle yet."""
        layout, bundles, keep = BundleLayout.of(weights), self._bundles.layers[layer], self._arena.keep
        slots, slot_bytes = self._bundles.slots, layout.read_bytes(predicted=predicted)
        args = BundleWindowArgs(
            reader=self.reader.address,
            memory=address(self.reader.target(slots * slot_bytes)),
            slot_count=slots,
            slot_bytes=slot_bytes,
            file_offset=bundles.offset,
            bundle_bytes=layout.nbytes,
            slots=keep(np.full(layout.neurons, -1, np.int32)),
            neurons=keep(np.full(slots, -1, np.int32)),
            uses=keep(np.zeros(slots, np.int32)),
            steps=keep(np.zeros(slots, np.int64)),
        )
        factors = allocate(layout.factor_bytes)
        factors[: layout.factor_bytes] = bundles.factors
        window = Window(layout, args, self._arena.keep_args(args), keep(factors))
        self.windows[layer] = window
        return window

    def close(self) -> None:
        """End the reads."""
        self.reader.close()
