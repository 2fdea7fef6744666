"""Bundles: the weights of a neuron stored together, so that one read of a file fetches them.

A bundle has the neuron's column of down, its row of up and its row of gate, each in the per-neuron layout
(`neuron_layout.py`). Steps that compute gate (up, without a gate) for all neurons read only the bytes before
it. The factors of down, which 32 neurons share, aren't part of the bundles.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from edgeinfer_kernels.blocks.feed_forward import FeedForwardWeights
from edgeinfer_kernels.cpu.compiler.kernel_cache import Kernels
from edgeinfer_kernels.cpu.layout.neuron_layout import (
    ColumnLayout,
    lay_out_columns,
    lay_out_rows,
    neuron_row_bytes,
)
from edgeinfer_kernels.matrix import Matrix
from edgeinfer_kernels.pages import Bytes

SECTOR_BYTES = 512
"""Bundles begin at multiples of it, as reads without the page cache must."""
NEURONS_PER_PIECE = 2048


def whole_sectors(nbytes: int) -> int:
    return -(-nbytes // SECTOR_BYTES) * SECTOR_BYTES


@dataclass(frozen=True)
class BundleLayout:
    """Offsets of a layer's bundles, in bytes. `rows`: of the matrices that are read by rows; the last is the
    one that shows which neurons are active.
    """

    down: ColumnLayout
    rows: tuple[tuple[Matrix, int], ...]
    nbytes: int
    """Of a bundle."""
    neurons: int

    @classmethod
    def of(cls, weights: FeedForwardWeights) -> "BundleLayout":
        down = ColumnLayout.of(weights.ffn_down)
        end, rows = down.neuron_bytes, []
        for matrix in (weights.ffn_up, weights.ffn_gate):
            if matrix is not None:
                rows.append((matrix, end))
                end += neuron_row_bytes(matrix)
        return cls(down, tuple(rows), whole_sectors(end), weights.ffn_up.rows)

    def read_bytes(self, *, predicted: bool) -> int:
        """Bytes of a bundle that a step reads."""
        return self.nbytes if predicted else whole_sectors(self.rows[-1][1])

    @property
    def factor_bytes(self) -> int:
        """Bytes of all factors of down."""
        return self.down.nbytes - self.neurons * self.down.neuron_bytes

    @property
    def factors(self) -> ColumnLayout:
        """The layout of down without the weights of its neurons."""
        return ColumnLayout(
            self.down.outputs, self.down.blocks, 0, self.down.factor_bytes,
            self.down.super_factor_bytes, self.down.blocks_per_super,
        )  # fmt: skip


def make_bundles(weights: FeedForwardWeights, kernels: Kernels) -> tuple[Iterator[Bytes], Bytes]:
    """The bundles of a layer in pieces of (neurons, bytes), and the factors of down."""
    layout = BundleLayout.of(weights)
    codes, factors = _codes_and_factors(weights.ffn_down)
    return _pieces(layout, codes, kernels), factors


def _codes_and_factors(down: Matrix) -> tuple[Bytes, Bytes]:
    """The weights of each neuron, (neurons, bytes), and the factors of all."""
    layout = ColumnLayout.of(down)
    whole = lay_out_columns(down)[: layout.nbytes].reshape(-1, layout.super_bytes)
    blocks = whole[:, layout.super_factor_bytes :].reshape(len(whole), -1, layout.block_bytes)
    codes = blocks[:, :, layout.factor_bytes :].reshape(-1, layout.neuron_bytes)
    block_factors = blocks[:, :, : layout.factor_bytes].reshape(len(whole), -1)
    return codes, np.hstack([whole[:, : layout.super_factor_bytes], block_factors]).reshape(-1)


def _pieces(layout: BundleLayout, codes: Bytes, kernels: Kernels) -> Iterator[Bytes]:
    for first in range(0, layout.neurons, NEURONS_PER_PIECE):
        last = min(layout.neurons, first + NEURONS_PER_PIECE)
        piece = np.zeros((last - first, layout.nbytes), np.uint8)
        piece[:, : layout.down.neuron_bytes] = codes[first:last]
        for matrix, begin in layout.rows:
            rows = lay_out_rows(matrix.take_rows(first, last), kernels)
            row_bytes = neuron_row_bytes(matrix)
            piece[:, begin : begin + row_bytes] = rows[: len(piece) * row_bytes].reshape(-1, row_bytes)
        yield piece
