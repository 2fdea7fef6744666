"""Memory that kernels access: structures filled by field name, matrices in the interleaved
layout.
"""

import ctypes
from collections.abc import Sequence
from ctypes import addressof
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.caches.layer_cache import padded
from edgeinfer_kernels.cpu.compiler.kernel_cache import Kernels
from edgeinfer_kernels.cpu.layout.fields import FIELDS, ROWS_PER_GROUP, gather_steps
from edgeinfer_kernels.cpu.runtime.structure import Structure
from edgeinfer_kernels.matrix import Matrix, MatrixShape
from edgeinfer_kernels.pages import Bytes, allocate
from edgeinfer_quant_formats import block_format, decode, encode
from edgeinfer_quant_formats.formats import FORMATS, ScaleField, non_finite_blocks, non_finite_error


class UnsupportedFormatError(ValueError):
    """A tensor's format has no CPU kernel."""


def kernel_format(matrix: MatrixShape) -> str:
    """The format of the kernel that multiplies this matrix on the CPU."""
    spec = FORMATS.get(matrix.format)
    name = (spec and spec.repacked_as) or matrix.format
    if name not in FIELDS:
        raise UnsupportedFormatError(
            f"{matrix.name}: no CPU kernel for {matrix.format}; convert the file with "
            "edgeinfer quantize IN OUT --type Q4_K_M"
        )
    return name


def is_float_format(matrix: MatrixShape) -> bool:
    """Whether the matrix is multiplied with float32 activations instead of int8."""
    return block_format(kernel_format(matrix)).block_elements == 1


def address(array: npt.NDArray[Any] | None) -> int:
    return 0 if array is None else int(array.ctypes.data)


def float_rows(at: int, rows: int, columns: int) -> npt.NDArray[np.float32]:
    """The float32 rows at an address; the owner of the memory must outlive them."""
    return np.ctypeslib.as_array(ctypes.cast(at, ctypes.POINTER(ctypes.c_float)), (rows, columns))


def byte_view(at: int, nbytes: int) -> Bytes:
    """The bytes at an address; the owner of the memory must outlive them."""
    return np.ctypeslib.as_array(ctypes.cast(at, ctypes.POINTER(ctypes.c_uint8)), (nbytes,))


def padded_vector(vector: npt.NDArray[np.float32] | None) -> npt.NDArray[np.float32] | None:
    """The vector, zero-padded to whole lanes."""
    return None if vector is None else padded_rows(vector[None])[0]


def padded_rows(rows: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Each row, zero-padded to whole lanes."""
    out = np.zeros((len(rows), padded(rows.shape[1])), np.float32)
    out[:, : rows.shape[1]] = rows
    return out


class Arena:
    """Keeps the arrays and structures alive that kernels point to."""

    def __init__(self) -> None:
        self.arrays: list[npt.NDArray[Any]] = []
        self._args: list[Structure | ctypes.Array[Any]] = []

    def keep(self, array: npt.NDArray[Any] | None) -> int:
        """Keep a reference to the array; return its address, 0 for None."""
        if array is not None:
            self.arrays.append(array)
        return address(array)

    def fill(self, kind: type[Structure], /, **values: float) -> int:
        """Allocate a structure with these fields (all others 0); return its address."""
        return self.keep_args(kind(**values))

    def fill_all(self, kind: type[Structure], structures: Sequence[Structure]) -> int:
        """Allocate consecutive copies of structures; return the address of the first."""
        return self.keep_args((kind * len(structures))(*structures))

    def keep_args(self, args: "Structure | ctypes.Array[Any]") -> int:
        """Keep a reference to a structure, or to several; return the address of the first."""
        self._args.append(args)
        return addressof(args)

    def clear(self) -> None:
        self.arrays.clear()
        self._args.clear()


@dataclass(frozen=True)
class RowLayout:
    """The layout of a format's rows in a file, for the kernels that interleave them."""

    blocks: int
    block_bytes: int
    fields: npt.NDArray[np.int64]
    """(offset, unit, count) of each of a block's `gather_steps`."""
    scales: npt.NDArray[np.int64]
    """(offset, unit, count, exponent) of a block's `ScaleField`."""

    @classmethod
    def of(cls, name: str, columns: int) -> "RowLayout":
        """The layout of rows in the kernel format `name`; a row of floats is one block."""
        spec = block_format(name)
        scales = spec.scales or ScaleField(0, 1, 0, 0)
        if spec.block_elements == 1:
            fields = np.array([(0, spec.block_bytes, columns)], np.int64)
            numbers = np.array([0, spec.block_bytes, columns, scales.exponent], np.int64)
            return cls(1, spec.row_bytes(columns), fields, numbers)
        fields = np.array([(f.offset, f.unit, f.count) for f in gather_steps(name)], np.int64)
        numbers = np.array([scales.offset, scales.unit, scales.count, scales.exponent], np.int64)
        return cls(columns // spec.block_elements, spec.block_bytes, fields, numbers)

    @property
    def row_bytes(self) -> int:
        return self.blocks * self.block_bytes


def kernel_columns(name: str, columns: int) -> int:
    """Columns that a GEMV kernel processes: floats are zero-padded to a multiple of four."""
    return -(-columns // 4) * 4 if block_format(name).block_elements == 1 else columns


def group_bytes(matrix: MatrixShape) -> int:
    """Bytes of sixteen rows in the interleaved layout."""
    name = kernel_format(matrix)
    return ROWS_PER_GROUP * block_format(name).row_bytes(kernel_columns(name, matrix.columns))


def expert_bytes(matrix: MatrixShape) -> int:
    """Bytes of the matrix of one expert in the interleaved layout."""
    return -(-matrix.rows // ROWS_PER_GROUP) * group_bytes(matrix)


def interleaved_bytes(matrix: MatrixShape) -> int:
    """Bytes of the matrix in the interleaved layout."""
    return matrix.experts * expert_bytes(matrix)


def interleave(matrix: Matrix, kernels: Kernels) -> Bytes:
    """The matrix in the interleaved layout, newly allocated.

    Raises `FormatError`: a scale is NaN or infinite.
    """
    name = kernel_format(matrix)
    layout = RowLayout.of(name, kernel_columns(name, matrix.columns))
    target = allocate(interleaved_bytes(matrix))
    move = kernels.function("interleave_rows", 9)
    fields, target_bytes = address(layout.fields), expert_bytes(matrix)
    broken = np.full(1, -1, np.int64)
    for expert in range(matrix.experts):
        raw = _kernel_rows(matrix.expert(expert), name, layout)
        where = address(raw), address(target) + expert * target_bytes, matrix.rows
        scales = address(layout.scales), address(broken)
        move(*where, layout.blocks, layout.block_bytes, fields, len(layout.fields), *scales)
        if broken[0] >= 0:
            row = expert * matrix.rows + int(broken[0])
            raise non_finite_error(matrix.name, f"row {row}")
    return target


def _kernel_rows(matrix: Matrix, name: str, layout: RowLayout) -> Bytes:
    """Contiguous rows in the kernel format `name`."""
    raw = matrix.raw
    if name != matrix.format:
        broken = non_finite_blocks(raw, matrix.format)
        if len(broken):
            row_bytes = raw.shape[1]
            row = int(broken[0]) * block_format(matrix.format).block_bytes // row_bytes
            raise non_finite_error(matrix.name, f"row {row}")
        raw = encode(decode(raw.reshape(-1), matrix.format), name).reshape(len(raw), -1)
    if layout.row_bytes > raw.shape[1]:
        raw = np.pad(raw, ((0, 0), (0, layout.row_bytes - raw.shape[1])))
    return np.ascontiguousarray(raw)
