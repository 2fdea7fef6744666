"""The embeddings of tokens: rows of a memory-mapped matrix."""

from collections.abc import Sequence
from ctypes import addressof
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.cpu.compiler.kernel_cache import Kernels
from edgeinfer_kernels.cpu.layout.fields import ROWS_PER_GROUP
from edgeinfer_kernels.cpu.layout.packed_matrix import (
    Arena,
    RowLayout,
    address,
)
from edgeinfer_kernels.cpu.runtime.abi import STEP_TOKENS
from edgeinfer_kernels.cpu.runtime.block_args import EmbedArgs
from edgeinfer_kernels.cpu.runtime.kernel_args import StepArgs
from edgeinfer_kernels.cpu.runtime.schedule import fill_step, quick_address
from edgeinfer_kernels.cpu.runtime.thread_pool import ThreadPool
from edgeinfer_kernels.lora.weights import LoraWeights
from edgeinfer_kernels.matrix import Matrix, MatrixShape
from edgeinfer_quant_formats import block_format


def embedding_scratch(matrix: MatrixShape) -> int:
    """Bytes of the scratch in which a kernel decodes a row: sixteen blocks, one of which is used."""
    return ROWS_PER_GROUP * block_format(matrix.format).block_bytes


class Scratch(NamedTuple):
    """`embedding_scratch` bytes for each thread: the address of the first, and the stride in bytes."""

    address: int
    stride: int


class Embedding:
    """Decodes rows of `matrix`, times `scale`: with a kernel if the kernels of its format are loaded, else
    with numpy.

    numpy takes about 150 us per row if the weights of a step have evicted it from the caches, and six times
    as long as the kernel for the rows of a prompt.
    """

    def __init__(
        self,
        matrix: Matrix,
        arena: Arena,
        kernels: Kernels,
        pool: ThreadPool,
        scratch: Scratch,
        scale: float = 1.0,
    ) -> None:
        self._matrix, self._pool, self._scale = matrix, pool, np.float32(scale)
        self._lora: LoraWeights | None = None
        self.block = 0
        """An EmbedArgs for a schedule of the thread pool, which sets the address of its ids before it runs; 0
        if no kernel decodes the rows.
        """
        name = f"decode_{matrix.format}"
        if kernels.find(name) and matrix.raw.flags.c_contiguous:
            layout = RowLayout.of(matrix.format, matrix.columns)
            self._decode = kernels.function(name, 6)
            self._source, self._row_bytes = address(matrix.raw), matrix.raw.strides[0]
            fields = arena.keep(layout.fields)
            self._settings = matrix.columns, fields, len(layout.fields), scratch.address
            self.block = arena.fill(
                EmbedArgs,
                decode=kernels.address(name),
                source=self._source,
                row_bytes=self._row_bytes,
                columns=matrix.columns,
                fields=fields,
                field_count=len(layout.fields),
                scale=scale,
                scratch=scratch.address,
                scratch_stride=scratch.stride,
            )
            self._args, self._step = EmbedArgs.from_address(self.block), StepArgs()
            self._run = kernels.address("embed_block"), self.block, addressof(self._step)

    def set_lora(self, lora: LoraWeights | None, args: int) -> None:
        """Use an adapter from now on, and its LoraArgs structure; None and 0: no adapter."""
        self._lora = lora
        if self.block:
            self._args.lora = args

    def write(self, ids: Sequence[int], x: npt.NDArray[np.float32]) -> None:
        """Write the rows of `ids`, times the scale, to `x`, float32 (len(ids), columns); many rows use all
        threads.

        Raises IndexError for an id outside the matrix.
        """
        last = self._matrix.rows - 1
        if min(ids) < 0 or max(ids) > last:
            wrong = next(row for row in ids if not 0 <= row <= last)
            raise IndexError(f"{self._matrix.name}: row {wrong}, wanted 0 to {last}")
        if self.block and (len(ids) > STEP_TOKENS or self._lora is not None):
            rows = np.asarray(ids, np.int64)
            self._args.ids = address(rows)
            fill_step(self._step, address(x), x.strides[0], len(ids), 0, 0)
            self._pool.run(*self._run)
            return
        if self.block:
            target = quick_address(x)
            for index, row in enumerate(ids):
                at = target + index * x.strides[0]
                self._decode(self._source + row * self._row_bytes, *self._settings, at)
        else:
            x[:] = self._matrix.decoded_rows(np.asarray(ids))
            if self._lora is not None:
                x += self._lora.b[0, np.asarray(ids)] @ self._lora.a[0]
        if self._scale != 1:
            x *= self._scale
