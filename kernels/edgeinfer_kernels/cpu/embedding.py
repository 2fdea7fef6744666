"""The embeddings of tokens: rows of a matrix that stays in its file."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.cpu.layout import ROWS_A_GROUP
from edgeinfer_kernels.cpu.memory import Arena, RowLayout, address, bits
from edgeinfer_kernels.cpu.objects import Kernels
from edgeinfer_kernels.cpu.structures import EMBED
from edgeinfer_kernels.weights import Matrix, MatrixFacts
from edgeinfer_quant_formats import block_format


def embedding_scratch(matrix: MatrixFacts) -> int:
    """Bytes of the scratch in which a kernel decodes a row: sixteen blocks, of which one is used."""
    return ROWS_A_GROUP * block_format(matrix.format).block_bytes


class Embedding:
    """Decodes rows of `matrix`: by a kernel where its format's kernels are loaded, else by numpy.

    numpy takes some 150 us for a row once the weights of a step have driven it out of the caches, and six
    times as long as the kernel for the rows of a prompt.
    """

    def __init__(self, matrix: Matrix, arena: Arena, kernels: Kernels, scratch: int) -> None:
        """`scratch`: the address of `embedding_scratch` bytes that nobody else uses meanwhile."""
        self._matrix = matrix
        name = f"decode_{matrix.format}"
        self._decode = None
        if kernels.find(name) and matrix.raw.flags.c_contiguous:
            layout = RowLayout.of(matrix.format, matrix.columns)
            self._decode = kernels.function(name, 6)
            self._source, self._row_bytes = address(matrix.raw), matrix.raw.strides[0]
            self._settings = matrix.columns, arena.keep(layout.fields), len(layout.fields), scratch
            self._kernel = kernels.address(name)

    @property
    def by_kernel(self) -> bool:
        """Whether a kernel decodes the rows."""
        return self._decode is not None

    def block(self, arena: Arena, scale: float, scratch_stride: int) -> int:
        """An EMBED, its ids left out; only where a kernel decodes the rows. `scratch_stride`: bytes from one
        thread's scratch to the next.
        """
        columns, fields, field_count, scratch = self._settings
        return arena.fill(
            EMBED,
            decode=self._kernel,
            source=self._source,
            row_bytes=self._row_bytes,
            columns=columns,
            fields=fields,
            field_count=field_count,
            scale=bits(scale),
            scratch=scratch,
            scratch_stride=scratch_stride,
        )

    def write(self, ids: Sequence[int], x: npt.NDArray[np.float32], x_address: int) -> None:
        """The rows of `ids` to `x`, float32 (len(ids), columns), whose rows lie from `x_address` on.

        Raises IndexError for an id that is no row.
        """
        if self._decode is None:
            x[:] = self._matrix.decoded_rows(np.asarray(ids))
            return
        for place, row in enumerate(ids):
            if not 0 <= row < self._matrix.rows:
                raise IndexError(f"{self._matrix.name}: row {row}, wanted 0 to {self._matrix.rows - 1}")
            target = x_address + place * x.strides[0]
            self._decode(self._source + row * self._row_bytes, *self._settings, target)
