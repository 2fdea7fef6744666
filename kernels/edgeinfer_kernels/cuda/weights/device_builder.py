"""Allocates the weights of blocks in the form that a device computes with.

A subclass of `DeviceBuilder` defines where the matrices are stored.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edgeinfer_kernels.blocks.common.rope import RopeSpec
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.weights.device_block import DeviceNorms
from edgeinfer_kernels.cuda.weights.packing import DeviceMatrix
from edgeinfer_kernels.cuda.weights.rope_tables import rope_table
from edgeinfer_kernels.decoder import ResidualWeights
from edgeinfer_kernels.matrix import Matrix, Vector
from edgeinfer_kernels.sizes.cuda_matrices import padded_rows

RopeTables = dict[tuple[RopeSpec | None, int], Tensor]
OrderedRows = tuple[Matrix, npt.NDArray[np.int64] | None]
"""A matrix, and the order of its rows within each head."""


@dataclass(frozen=True)
class Stack:
    """Stacked matrices, adjacent ones of one format merged; formats for at most two launches."""

    parts: tuple[DeviceMatrix, ...]

    @property
    def rows(self) -> int:
        return sum(part.shapes.padded_rows for part in self.parts)

    def begins(self, lengths: Sequence[int], *, padded: bool) -> list[int]:
        """Where the results of the matrices with these row counts begin in a row of results, in which every
        part is `padded` or not.
        """
        begins, first, at = list[int](), 0, 0
        remaining = list(lengths)
        for part in self.parts:
            at, end = first, first + part.shapes.rows
            while remaining and at + remaining[0] <= end:
                begins.append(at)
                at += remaining.pop(0)
            first += padded_rows(part.shapes.rows) if padded else part.shapes.rows
        return begins


class DeviceBuilder:
    """Allocates the data of blocks from an arena, including vectors and tables, which `fill_vectors`
    uploads.

    Blocks with the same `tables` share their RoPE tables.
    """

    def __init__(self, arena: Arena, positions: int, tables: RopeTables) -> None:
        self.positions = positions
        self._arena = arena
        self.tables = tables
        self._vectors: list[tuple[Tensor, npt.NDArray[Any]]] = []

    def matrix(self, source: Matrix) -> DeviceMatrix:
        raise NotImplementedError

    def down(self, source: Matrix) -> DeviceMatrix:
        """The down projection of a feed-forward, which may be stored by neuron."""
        return self.matrix(source)

    def stack(self, matrices: Sequence[OrderedRows]) -> Stack:
        """Matrices that are multiplied with the same rows."""
        raise NotImplementedError

    def fill_vectors(self) -> None:
        """Upload vectors and tables."""
        for tensor, values in self._vectors:
            tensor.copy_(torch.from_numpy(values))
        self._vectors.clear()

    def vector(self, values: Vector | None, size: int = 0) -> Tensor | None:
        """The values in float32, zero-padded to `size`."""
        if values is None:
            return None
        padded = np.zeros(max(size, len(values)), np.float32)
        padded[: len(values)] = values
        tensor = self._arena.take(padded.shape, torch.float32)
        self._vectors.append((tensor, padded))
        return tensor

    def norms(self, w: ResidualWeights[Any]) -> DeviceNorms:
        """The norms around a block."""
        return DeviceNorms(self.vector(w.norm), self.vector(w.norm_bias), self.vector(w.post_norm))

    def floats(self, matrix: Matrix) -> Tensor:
        """The matrix in float32, (rows, columns)."""
        raise NotImplementedError

    def integers(self, values: npt.NDArray[np.int32]) -> Tensor:
        """A table of integers, such as expert slots."""
        tensor = self._arena.take(values.shape, torch.int32)
        self._vectors.append((tensor, values))
        return tensor

    def stacked_bias(
        self,
        biases: Sequence[Vector | None],
        matrices: Sequence[Matrix],
        orders: Sequence[npt.NDArray[np.int64] | None],
    ) -> Tensor | None:
        if all(bias is None for bias in biases):
            return None
        stacked = []
        for bias, matrix, order in zip(biases, matrices, orders, strict=True):
            values = np.zeros(padded_rows(matrix.rows), np.float32)
            if bias is not None:
                values[: matrix.rows] = bias if order is None else reordered(bias, order)
            stacked.append(values)
        return self.vector(np.concatenate(stacked))

    def rope_table(self, rope: RopeSpec | None, head_dim: int) -> Tensor:
        """The table of a RoPE; see `rope_tables.py`."""
        key = rope, head_dim
        if key not in self.tables:
            table = rope_table(rope, head_dim, self.positions)
            tensor = self._arena.take(table.shape, torch.float32)
            self._vectors.append((tensor, table))
            self.tables[key] = tensor
        return self.tables[key]


def reordered(vector: Vector | None, order: npt.NDArray[np.int64]) -> Vector | None:
    """A vector over heads with the dimensions of each head in their new order."""
    if vector is None:
        return None
    return np.ascontiguousarray(vector.reshape(-1, len(order))[:, order].reshape(-1))
