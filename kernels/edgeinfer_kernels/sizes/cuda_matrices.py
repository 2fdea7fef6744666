"""Bytes of matrices, vectors and activations on a CUDA device, computed from sizes, without torch or a GPU.

The counts match the allocations on the device exactly; a test compares the two.
"""

from collections.abc import Iterable, Sequence
from typing import Protocol

from edgeinfer_kernels.caches.cache_types import SCALED_TYPES, CacheType, ElementType, has_recent
from edgeinfer_kernels.caches.layer_cache import DTYPES
from edgeinfer_kernels.cuda.tuning.step_shapes import MAX_SPLITS, next_power_of_two
from edgeinfer_kernels.cuda.weights.plane_formats import (
    FLOAT_CODES,
    ROW_MULTIPLE,
    PlaneShapes,
    padded_blocks,
)
from edgeinfer_kernels.matrix import MatrixSize
from edgeinfer_quant_formats import block_format
from edgeinfer_quant_formats.formats import KERNEL_FORMATS

ALIGNMENT = 256
"""Every allocation in device memory starts at a multiple of this many bytes."""
QUERY_TOKENS = 8
"""Maximum number of tokens whose queries a program of a step's attention has."""
SPARE_POSITIONS = 16
"""Cache positions beyond the context, because a step writes whole tiles."""
RECENT_DEVICE_PAGES = 39
"""Pages of recent positions in f16 on a GPU: those of a chunk of 512 tokens and the two before it, and some
that stay for rewinds and other sequences; a step of eight sequences needs 24.
"""


def cache_positions(context: int) -> int:
    """Cache positions for this many tokens: always a multiple of SPARE_POSITIONS. Kernels are specialized for
    that, so all contexts use the same kernels.
    """
    return (-(-context // SPARE_POSITIONS) + 1) * SPARE_POSITIONS


def recent_device_slots(positions: int) -> int:
    """Pages of recent positions in f16 on a GPU, next to a cache with `positions`; the last is a spare one.
    See `cuda/cache/recent_positions.py`.
    """
    return min(RECENT_DEVICE_PAGES, positions // SPARE_POSITIONS) + 1


def recent_device_bytes(heads: int, widths: Iterable[int], context: int, kind: CacheType) -> int:
    """Bytes of the recent positions of a cache for `context` tokens; 0 with a type that has none."""
    if not has_recent(kind):
        return 0
    rows = heads * SPARE_POSITIONS * recent_device_slots(cache_positions(context))
    return sum(taken(rows * width, 2) for width in widths)


def taken(elements: int, size: int) -> int:
    """Bytes of an allocation of `elements` of `size` bytes, rounded up to the alignment."""
    return -(-elements * size // ALIGNMENT) * ALIGNMENT


def padded_rows(rows: int) -> int:
    """Rows of a matrix including padding."""
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE


def planes_of(matrix: MatrixSize) -> PlaneShapes:
    return PlaneShapes.of(matrix.name, matrix.format, matrix.rows, matrix.columns)


def matrix_bytes(matrix: MatrixSize) -> int:
    """Bytes of a matrix in planes. Raises `UnsupportedOnDeviceError`."""
    shapes = planes_of(matrix)
    rows, planes, blocks = shapes.words
    pieces = (rows * planes * blocks, *(a * b for a, b in (shapes.scales, shapes.super_scales)))
    return sum(taken(piece, 4) for piece in pieces)


def vector_bytes(lengths: Iterable[int]) -> int:
    return sum(taken(length, 4) for length in lengths)


def row_runs(matrices: Sequence[MatrixSize]) -> list[MatrixSize]:
    """Merge adjacent matrices of one format into one matrix with all their rows."""
    runs: list[MatrixSize] = []
    for matrix in matrices:
        if runs and runs[-1].format == matrix.format:
            top = runs.pop()
            matrix = MatrixSize(top.name, top.format, top.rows + matrix.rows, top.columns)
        runs.append(matrix)
    return runs


def attention_rows(heads: int, kv_heads: int, tokens: int) -> int:
    """Rows of the query tile of a KV head: of at most QUERY_TOKENS tokens."""
    return max(16, next_power_of_two(heads // kv_heads * min(tokens, QUERY_TOKENS)))


def attention_parts(heads: int, kv_heads: int, tokens: int) -> int:
    """Rows of the partial results of all KV splits of a step's attention."""
    return tokens * kv_heads * MAX_SPLITS * next_power_of_two(heads // kv_heads)


def head_dimensions(head_dim: int) -> int:
    """head_dim padded to the tiles of the kernels."""
    return max(16, next_power_of_two(head_dim))


def cache_bytes(rows: int, width: int, kind: ElementType) -> int:
    """Bytes of `rows` keys or values of `width` elements in a cache, with their scales."""
    elements, size = (-(-width // 8), 4) if kind == "q4_0" else (width, DTYPES[kind].itemsize)
    scales = -(-width // 32) if kind in SCALED_TYPES else 0
    return taken(rows * elements, size) + taken(rows * scales, 2)


def reads_raw_rows(format_name: str) -> bool:
    """Whether kernels can decode rows of this format as they are in the file."""
    spec = block_format(format_name)
    return spec.name in KERNEL_FORMATS and spec.scale_dtype not in ("e8m0", "e4m3")


def table_bytes(table: MatrixSize | None) -> int:
    """Bytes of a table of rows as they are in the file; 0: there is none, or no kernel for it."""
    return 0 if table is None or not reads_raw_rows(table.format) else taken(table.nbytes, 1)


def has_floats(matrices: Iterable[MatrixSize]) -> bool:
    """Whether one of the matrices is in a float format, which needs float activations."""
    return any(planes_of(matrix).tile.code in FLOAT_CODES for matrix in matrices)


def activation_bytes(tokens: int, columns: int, floats: bool, rows_per_token: int = 1) -> int:
    """Bytes of activations of a decode step."""
    return taken(rows_per_token * tokens * (44 if floats else 12) * padded_blocks(columns), 4)


class Heads(Protocol):
    """A specification with heads."""

    @property
    def result_columns(self) -> int:
        """Elements of a row of all heads' results."""
        ...


def result_widths(specs: Iterable[Heads]) -> list[int]:
    """The different lengths of the rows of all heads' results, ascending."""
    return sorted({spec.result_columns for spec in specs})
