"""Prepares matrices for kernels: repacked into the kernel layout by several threads, or left
memory-mapped.
"""

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from ctypes import sizeof

from edgeinfer_kernels.cpu.block_builder import PackedMatrix
from edgeinfer_kernels.cpu.compiler.kernel_cache import Kernels
from edgeinfer_kernels.cpu.layout.file_rows import file_rows
from edgeinfer_kernels.cpu.layout.packed_matrix import Arena, expert_bytes, interleave, kernel_format
from edgeinfer_kernels.cpu.runtime.kernel_args import FileRowsArgs
from edgeinfer_kernels.matrix import Matrix

OnLoaded = Callable[[Matrix], None]
"""Called when a matrix is repacked and its bytes in the file are no longer needed."""


def repack(
    matrices: Sequence[Matrix], kernels: Kernels, arena: Arena, threads: int, on_loaded: OnLoaded | None
) -> dict[int, PackedMatrix]:
    """Repack every matrix into the kernel layout, owned by the arena; keyed by id."""
    packed = {}
    with ThreadPoolExecutor(max_workers=threads) as pool:
        moved = pool.map(lambda matrix: interleave(matrix, kernels), matrices)
        for matrix, memory in zip(matrices, moved, strict=True):
            name = f"rows_{kernel_format(matrix)}"
            kernel, by_tiles = kernels.address(name), kernels.find(f"tile_{name}")
            packed[id(matrix)] = PackedMatrix(kernel, arena.keep(memory), by_tiles, expert_bytes(matrix))
            if on_loaded:
                on_loaded(matrix)
    return packed


def leave_in_file(
    matrices: Iterable[Matrix], kernels: Kernels, arena: Arena, group_offset: int
) -> dict[int, PackedMatrix]:
    """Every matrix as memory-mapped rows, keyed by id; sixteen rows at a time are interleaved in a thread's
    scratch, from `group_offset` on.
    """
    kernel, stride = kernels.address("rows_in_file"), sizeof(FileRowsArgs)
    return {
        id(matrix): PackedMatrix(
            kernel, file_rows(matrix, arena, kernels, group_offset), expert_stride=stride
        )
        for matrix in matrices
    }
