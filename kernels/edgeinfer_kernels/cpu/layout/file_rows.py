"""Memory-mapped matrices: the data that the kernel of `native/gemv/file_rows.py` needs."""

from collections.abc import Iterable

from edgeinfer_kernels.cpu.compiler.kernel_cache import Kernels
from edgeinfer_kernels.cpu.layout.packed_matrix import Arena, RowLayout, group_bytes, kernel_format
from edgeinfer_kernels.cpu.runtime.kernel_args import FileRowsArgs
from edgeinfer_kernels.matrix import Matrix, MatrixShape


def _is_ternary(matrix: MatrixShape) -> bool:
    """Whether the rows are TQ1_0, which has no kernel."""
    return kernel_format(matrix) != matrix.format


def file_rows_scratch(matrices: Iterable[MatrixShape]) -> int:
    """Bytes of a thread's scratch in which 32 rows of any of these matrices are interleaved; of TQ1_0
    sixteen, which are widened before.
    """
    return max((2 * group_bytes(matrix) for matrix in matrices), default=0)


def file_rows(matrix: Matrix, arena: Arena, kernels: Kernels, group_offset: int) -> int:
    """Address of the matrix's FileRowsArgs, one for each expert; the arena keeps the memory map open."""
    name = kernel_format(matrix)
    layout = RowLayout.of(name, matrix.columns)
    first, expert_bytes = arena.keep(matrix.raw), matrix.rows * matrix.raw.strides[0]
    alike: dict[str, float] = {
        "kernel": kernels.address(f"rows_{name}"),
        "rows": matrix.rows,
        "row_bytes": matrix.raw.strides[0],
        "ternary": int(_is_ternary(matrix)),
        "layout_row_bytes": layout.row_bytes,
        "blocks": layout.blocks,
        "block_bytes": layout.block_bytes,
        "fields": arena.keep(layout.fields),
        "field_count": len(layout.fields),
        "group_bytes": group_bytes(matrix),
        "group_offset": group_offset,
    }
    numbers = matrix.picked or range(matrix.experts)
    made = [FileRowsArgs(**alike, source=first + i * expert_bytes) for i in numbers]
    return arena.fill_all(FileRowsArgs, made)
