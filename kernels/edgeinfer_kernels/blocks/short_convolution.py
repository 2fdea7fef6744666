"""Gated short convolution: specification, weights, recent rows and sizes of one block."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.blocks.block import BlockSizes, ChunkRows, NormLengths, StepShape, TensorReader
from edgeinfer_kernels.cpu.runtime.abi import RING_ROWS, ROWS_SCRATCH, quantized_bytes
from edgeinfer_kernels.layer_cache import CacheType, padded
from edgeinfer_kernels.matrix import Matrix, MatrixSize, Vector
from edgeinfer_kernels.recent_rows import RecentRows, checkpoints_for, rows_for
from edgeinfer_kernels.sizes.cuda_matrices import (
    activation_bytes,
    cache_positions,
    has_floats,
    matrix_bytes,
    padded_rows,
    row_runs,
    taken,
    vector_bytes,
)

MAX_TAPS = 32


@dataclass(frozen=True)
class ShortConvolutionSpec:
    """out(c · conv(b · x)), where b, c and x are projections of the input. conv is causal, over `taps`
    positions, with separate weights for each of the `channels`.
    """

    kind: ClassVar[str] = "short_convolution"
    is_divisible: ClassVar[bool] = False

    channels: int
    taps: int

    @property
    def head_shape(self) -> tuple[int, ...]:
        return ()

    @property
    def recurrent_rows(self) -> int:
        return self.taps - 1

    def read(self, tensors: TensorReader) -> "ShortConvolutionWeights":
        width, rows = tensors.hidden_size, self.channels
        whole = tensors.matrix("shortconv.in_proj", 3 * rows, width)
        b, c, x = (whole.take_rows(part * rows, (part + 1) * rows) for part in range(3))
        taps = tensors.required("shortconv.conv.weight", rows * self.taps)
        return ShortConvolutionWeights(
            b, c, x, tensors.matrix("shortconv.out_proj", width, rows), taps.reshape(rows, self.taps).T
        )

    def sizes(self, weights: "ShortConvolutionWeights", norms: NormLengths) -> "ShortConvolutionSizes":
        b, c, x, output = map(MatrixSize.of, weights.matrices())
        return ShortConvolutionSizes(self, b, c, x, output, (self.channels * self.taps, *norms.vectors))

    def state_nbytes(self, context: int, cache_type: CacheType) -> int:
        """Bytes of the recent rows in main memory, in float32."""
        return 4 * rows_for(context, self.recurrent_rows) * padded(self.channels)

    def allocate_state(self, context: int, cache_type: CacheType) -> "ShortConvolutionState":
        rows = RecentRows.allocate(context, self.recurrent_rows, padded(self.channels))
        return ShortConvolutionState(self, rows)


@dataclass(frozen=True)
class ShortConvolutionWeights:
    """The weights of a short convolution: the row ranges of its first projection, the projection back, and
    the weights of the taps, (taps, channels), the last for the token itself.
    """

    kind: ClassVar[str] = "short_convolution"

    b: Matrix
    c: Matrix
    x: Matrix
    output: Matrix
    taps: Vector

    def matrices(self) -> list[Matrix]:
        return [self.b, self.c, self.x, self.output]

    def granule_matrices(self) -> list[Matrix]:
        return self.matrices()


@dataclass(frozen=True)
class ShortConvolutionState:
    """The rows b · x of recent positions, in main memory."""

    spec: ShortConvolutionSpec
    rows: RecentRows

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes

    def views(self, end: int) -> tuple[npt.NDArray[np.generic], ...]:
        return self.rows.views(end)

    def copy(self, source: int, target: int, count: int) -> None:
        raise NotImplementedError("recent rows belong to one sequence")

    def evict(self, positions: npt.NDArray[np.int64], end: int) -> None:
        raise NotImplementedError("a recurrent state has no positions to evict")

    def restore_checkpoint(self, position: int) -> None:
        self.rows.restore_checkpoint(position)


@dataclass(frozen=True)
class ShortConvolutionSizes(BlockSizes):
    """The sizes of a short convolution. `vectors`: lengths of its taps and norms."""

    label: ClassVar[str] = "short convolution"
    state_label: ClassVar[str] = "recent rows"

    spec: ShortConvolutionSpec
    b: MatrixSize
    c: MatrixSize
    x: MatrixSize
    output: MatrixSize
    vectors: tuple[int, ...] = ()

    def undivided(self) -> list[MatrixSize]:
        return [self.b, self.c, self.x, self.output]

    def undivided_device_bytes(self) -> int:
        stack = sum(map(matrix_bytes, self.stacked_inputs()))
        return stack + matrix_bytes(self.output) + vector_bytes(self.vectors)

    def state_bytes(self, context: int, cache_type: CacheType) -> int:
        return self.spec.state_nbytes(context, cache_type)

    def state_device_bytes(self, context: int, cache_type: CacheType) -> int:
        """The ring and the checkpoints, in float32."""
        checkpoints = checkpoints_for(cache_positions(context)) * self.spec.recurrent_rows
        return sum(taken(rows * self.spec.channels, 4) for rows in (RING_ROWS, checkpoints))

    def state_operations(self, tokens: int, start: int) -> float:
        return 2 * tokens * self.spec.channels * (self.spec.taps + 1)

    def cpu_buffers(self, hidden_size: int) -> dict[str, int]:
        row = 4 * padded(self.spec.channels)
        return {
            "conv_out": row,
            "conv_out.quantized": quantized_bytes(padded(self.spec.channels)),
            "convolution_b": row,
            "convolution_c": row,
            "convolution_x": row,
        }

    def cpu_scratch(self) -> int:
        return ROWS_SCRATCH

    def inputs(self) -> list[MatrixSize]:
        return [self.b, self.c, self.x]

    def stacked_inputs(self) -> list[MatrixSize]:
        return row_runs(self.inputs())

    def outputs(self) -> list[MatrixSize]:
        return [self.output]

    @classmethod
    def step_bytes(cls, blocks: Sequence["ShortConvolutionSizes"], step: StepShape) -> int:
        """The three projections, the rows before the last projection, and these as its input."""
        channels = max(block.spec.channels for block in blocks)
        rows = max(sum(padded_rows(run.rows) for run in block.stacked_inputs()) for block in blocks)
        conv_out = activation_bytes(step.tokens, channels, has_floats(block.output for block in blocks))
        return conv_out + taken(step.tokens * rows, 4) + taken(step.tokens * channels, 4)

    def chunk_rows(self, chunk: int, hidden_size: int) -> ChunkRows:
        channels = self.spec.channels
        return ChunkRows(chunk * channels, chunk, chunk * max(3 * channels, hidden_size))

    def streamed_vector_bytes(self) -> int:
        return vector_bytes(self.vectors)

    @classmethod
    def streamed_state_bytes(cls, blocks: Sequence["ShortConvolutionSizes"], context: int) -> int:
        """The recent rows of the largest block."""
        return max(block.state_device_bytes(context, "f16") for block in blocks)
