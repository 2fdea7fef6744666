"""Weight matrices in the format of the file, and their sizes without the weights."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from edgeinfer_quant_formats import block_format, decode

Vector = npt.NDArray[np.float32]


class MatrixShape(Protocol):
    """Name, format and size of a weight matrix, from which its byte size follows."""

    @property
    def name(self) -> str: ...
    @property
    def format(self) -> str: ...
    @property
    def rows(self) -> int: ...
    @property
    def columns(self) -> int: ...
    @property
    def experts(self) -> int: ...


MemoryKey = tuple[int, tuple[int, ...], tuple[int, ...]]
"""Identifies the bytes of a matrix, see `Matrix.memory_key`."""


@dataclass(frozen=True)
class Matrix:
    """A weight matrix: `raw` is (rows, bytes per row) uint8, usually a view of the memory-mapped file.

    With `experts`, `raw` holds that many matrices of (rows, columns), stacked along the rows. `picked`
    restricts it to these expert indices, in this order. `scales`: a factor of the weights of each of these
    experts; None: all are 1.
    """

    name: str
    format: str
    rows: int
    columns: int
    raw: npt.NDArray[np.uint8]
    experts: int = 1
    picked: tuple[int, ...] = ()
    scales: Vector | None = None

    @property
    def row_scales(self) -> Vector | None:
        """The factor of each row's weights."""
        return None if self.scales is None else np.repeat(self.scales, self.rows)

    def expert(self, index: int) -> "Matrix":
        """One expert's matrix, without a copy."""
        first = (self.picked[index] if self.picked else index) * self.rows
        raw = self.raw[first : first + self.rows]
        scales = None if self.scales is None else self.scales[index : index + 1]
        return Matrix(self.name, self.format, self.rows, self.columns, raw, scales=scales)

    def take_rows(self, first: int, last: int) -> "Matrix":
        """The matrix of rows first..last, without a copy."""
        return replace(self, rows=last - first, raw=self.raw[first:last])

    def reordered(self, order: npt.NDArray[np.integer]) -> "Matrix":
        """A copy with these rows in this order."""
        return replace(self, rows=len(order), raw=self.raw[order])

    def take_columns(self, first: int, last: int) -> "Matrix":
        """The matrix of columns first..last, in whole blocks of its format; its rows are not contiguous in
        memory.

        Raises `FormatError`: a block would be cut.
        """
        row_bytes = block_format(self.format).row_bytes
        begin, end = (row_bytes(column) if column else 0 for column in (first, last))
        return replace(self, columns=last - first, raw=self.raw[:, begin:end])

    def take_experts(self, numbers: Sequence[int]) -> "Matrix":
        """The matrices of these experts, in this order, without a copy."""
        first, count = (numbers[0] if numbers else 0), len(numbers)
        scales = None if self.scales is None else self.scales[list(numbers)]
        taken = replace(self, experts=count, scales=scales)
        if self.picked:
            return replace(taken, picked=tuple(self.picked[number] for number in numbers))
        if list(numbers) == list(range(first, first + count)):
            return replace(taken, raw=self.raw[first * self.rows : (first + count) * self.rows])
        return replace(taken, picked=tuple(numbers))

    def decoded(self) -> npt.NDArray[np.float32]:
        """(rows, columns) float32; with `experts`, the rows of all experts."""
        if self.picked:
            return np.concatenate([self.expert(index).decoded() for index in range(self.experts)])
        weights = decode(self.raw.reshape(-1), self.format).reshape(-1, self.columns)
        factors = self.row_scales
        return weights if factors is None else weights * factors[:, None]

    def decoded_rows(self, indices: npt.NDArray[np.integer]) -> npt.NDArray[np.float32]:
        """(len(indices), columns) float32, of a table without `scales`."""
        if len(indices) == 1:  # A view avoids a copy, because this runs for every token.
            return decode(self.raw[indices[0]], self.format).reshape(1, self.columns)
        return decode(self.raw[indices].reshape(-1), self.format).reshape(len(indices), self.columns)

    @property
    def memory_key(self) -> MemoryKey:
        """Memory address, shape and strides of the raw bytes; equal only for two views of the same
        weights.
        """
        return self.raw.ctypes.data, self.raw.shape, self.picked

    @property
    def nbytes(self) -> int:
        return self.experts * self.rows * int(self.raw.shape[1])


@dataclass(frozen=True)
class MatrixSize:
    """Shape and format of a weight matrix; two of equal shape and format compare equal."""

    name: str = field(compare=False)
    format: str
    rows: int
    columns: int
    experts: int = 1

    @classmethod
    def of(cls, matrix: MatrixShape) -> "MatrixSize":
        """The size of a matrix, or of one expert's matrix."""
        return cls(matrix.name, matrix.format, matrix.rows, matrix.columns)

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return block_format(self.format).nbytes((self.rows, self.columns))

    @property
    def weights(self) -> int:
        return self.rows * self.columns


def vector_lengths(*vectors: Vector | None) -> tuple[int, ...]:
    """The lengths of the vectors that exist."""
    return tuple(len(vector) for vector in vectors if vector is not None)
