"""The sizes of blocks that project their input, convolve it over the last positions, and project it back."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from edgeinfer_kernels.blocks.common.block_sizes import ChunkRows, StepShape
from edgeinfer_kernels.blocks.common.recurrent_block import RecurrentSizes
from edgeinfer_kernels.caches.layer_cache import padded
from edgeinfer_kernels.cpu.runtime.abi import RING_ROWS, quantized_bytes
from edgeinfer_kernels.matrix import MatrixSize
from edgeinfer_kernels.sizes.cuda_matrices import (
    activation_bytes,
    has_floats,
    matrix_bytes,
    padded_rows,
    row_runs,
    taken,
    vector_bytes,
)

MAX_TAPS = 32


@dataclass(frozen=True)
class ConvolutionSizes(RecurrentSizes):
    """The sizes of a block with a convolution. `projections`: the matrices that read the normed hidden
    states. `vectors`: lengths of its vectors and norms.
    """

    projections: tuple[MatrixSize, ...]
    output: MatrixSize
    vectors: tuple[int, ...]

    def undivided(self) -> list[MatrixSize]:
        return [*self.projections, self.output]

    def undivided_device_bytes(self) -> int:
        stack = sum(map(matrix_bytes, self.stacked_inputs()))
        return stack + matrix_bytes(self.output) + vector_bytes(self.vectors)

    def inputs(self) -> list[MatrixSize]:
        return list(self.projections)

    def stacked_inputs(self) -> list[MatrixSize]:
        return row_runs(self.inputs())

    def outputs(self) -> list[MatrixSize]:
        return [self.output]

    def streamed_vector_bytes(self) -> int:
        return vector_bytes(self.vectors)


@dataclass(frozen=True)
class MatrixStateSizes(ConvolutionSizes):
    """The sizes of a block that also updates a matrix by every position. Its specification has `channels`,
    the elements that are convolved, and `result_width`, the elements that `output` reads.
    """

    def cpu_buffers(self, hidden_size: int) -> dict[str, int]:
        results = padded(self.spec.result_width)
        return {
            "state_rows": 4 * self.spec.recurrent.row_width,
            "conv_rows": 4 * padded(self.spec.channels),
            "projected_z": 4 * results,
            "attn_out": 4 * results,
            "attn_out.quantized": quantized_bytes(results),
        }

    @classmethod
    def step_bytes(cls, blocks: Sequence[Self], step: StepShape) -> int:
        """The projections, `_row_bytes`, and the input of the last projection."""
        rows = max(stacked_rows(block.stacked_inputs()) for block in blocks)
        results = max(block.spec.result_width for block in blocks)
        conv_out = activation_bytes(step.tokens, results, has_floats(block.output for block in blocks))
        return conv_out + taken(step.tokens * rows, 4) + cls._row_bytes(blocks, step.tokens)

    @classmethod
    def prompt_bytes(cls, blocks: Sequence[Self], chunk: int, hidden_size: int) -> int:
        return cls._row_bytes(blocks, chunk)

    @classmethod
    def _row_bytes(cls, blocks: Sequence[Self], tokens: int) -> int:
        """The rows of the state, the convolution's results with those of pending positions, and the results
        of the heads.
        """
        rows = tokens * max(block.spec.recurrent.row_width for block in blocks)
        conv = (tokens + RING_ROWS) * max(block.spec.channels for block in blocks)
        results = tokens * max(block.spec.result_width for block in blocks)
        return taken(rows, 4) + taken(conv, 4) + taken(results, 4)

    def chunk_rows(self, chunk: int, hidden_size: int) -> ChunkRows:
        rows = stacked_rows(self.stacked_inputs())
        return ChunkRows(chunk * self.spec.result_width, chunk, chunk * max(rows, hidden_size))


def stacked_rows(runs: Sequence[MatrixSize]) -> int:
    """Results per token of matrices that a GPU multiplies in one launch."""
    return sum(padded_rows(run.rows) for run in runs)
