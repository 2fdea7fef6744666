"""Gated short convolution: specification, weights and sizes of one block."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from edgeinfer_kernels.blocks.common.block import BlockWeights, TensorReader
from edgeinfer_kernels.blocks.common.block_sizes import ChunkRows, NormLengths, StepShape
from edgeinfer_kernels.blocks.common.recurrent_block import RecurrentSpec
from edgeinfer_kernels.caches.layer_cache import padded
from edgeinfer_kernels.cpu.runtime.abi import quantized_bytes
from edgeinfer_kernels.matrix import Matrix, MatrixSize, Vector
from edgeinfer_kernels.recurrent_state import RecurrentShape
from edgeinfer_kernels.sizes.convolution_sizes import ConvolutionSizes, stacked_rows
from edgeinfer_kernels.sizes.cuda_matrices import activation_bytes, has_floats, taken


@dataclass(frozen=True)
class ShortConvolutionSpec(RecurrentSpec):
    """out(c · conv(b · x)), where b, c and x are projections of the input. conv is causal, over `taps`
    positions, with separate weights for each of the `channels`.
    """

    kind: ClassVar[str] = "short_convolution"
    takes_trees: ClassVar[bool] = True

    channels: int
    taps: int
    slots: int = 2

    @property
    def recurrent(self) -> RecurrentShape:
        """The rows b · x of the positions before a token."""
        width = padded(self.channels)
        return RecurrentShape(self.taps - 1, width, width, 0, self.slots)

    def read(self, tensors: TensorReader) -> "ShortConvolutionWeights":
        width, rows = tensors.hidden_size, self.channels
        whole = tensors.matrix("shortconv.in_proj", 3 * rows, width)
        b, c, x = (whole.take_rows(part * rows, (part + 1) * rows) for part in range(3))
        taps = tensors.required("shortconv.conv.weight", rows * self.taps)
        return ShortConvolutionWeights(
            b, c, x, tensors.matrix("shortconv.out_proj", width, rows), taps.reshape(rows, self.taps).T
        )

    def sizes(self, weights: "ShortConvolutionWeights", norms: NormLengths) -> "ShortConvolutionSizes":
        *projections, output = map(MatrixSize.of, weights.matrices())
        vectors = (self.channels * self.taps, *norms.vectors)
        return ShortConvolutionSizes(self, tuple(projections), output, vectors)


@dataclass(frozen=True)
class ShortConvolutionWeights(BlockWeights):
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


@dataclass(frozen=True)
class ShortConvolutionSizes(ConvolutionSizes):
    """The sizes of a short convolution."""

    label: ClassVar[str] = "short convolution"

    spec: ShortConvolutionSpec

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
            "state_rows": row,
        }

    @classmethod
    def step_bytes(cls, blocks: Sequence["ShortConvolutionSizes"], step: StepShape) -> int:
        """The three projections, the rows before the last projection, and these as its input."""
        channels = max(block.spec.channels for block in blocks)
        rows = max(stacked_rows(block.stacked_inputs()) for block in blocks)
        conv_out = activation_bytes(step.tokens, channels, has_floats(block.output for block in blocks))
        flat = taken(step.tokens * channels, 4) + taken(step.tokens * padded(channels), 4)
        return conv_out + taken(step.tokens * rows, 4) + flat

    @classmethod
    def prompt_bytes(cls, blocks: Sequence["ShortConvolutionSizes"], chunk: int, hidden_size: int) -> int:
        """The rows of the state."""
        return taken(chunk * max(block.spec.recurrent.row_width for block in blocks), 4)

    def chunk_rows(self, chunk: int, hidden_size: int) -> ChunkRows:
        channels = self.spec.channels
        return ChunkRows(chunk * channels, chunk, chunk * max(3 * channels, hidden_size))
