"""The convolution of a block of drafts before a block of its layer: specification, weights and sizes."""

from dataclasses import dataclass
from typing import ClassVar

from edgeinfer_kernels.blocks.common.block import BlockWeights, StatelessSpec, TensorReader
from edgeinfer_kernels.blocks.common.block_sizes import BlockSizes, NormLengths
from edgeinfer_kernels.caches.layer_cache import padded
from edgeinfer_kernels.cpu.runtime.abi import quantized_bytes
from edgeinfer_kernels.matrix import Matrix, MatrixSize, Vector

ROWS, FACTORS = "convolution rows", "convolution factors"
"""The buffers of the normed rows, and of their projections."""
RESIDUAL, CONVOLVED = "convolution residual", "convolved rows"
"""The buffers of x before this block, and of x after it."""
LANES = 16


@dataclass(frozen=True)
class Convolution:
    """A causal convolution of `taps` taps over the tokens of a step, one weight for each channel: that of the
    file, and a factor of the token that a group of `group_size` channels shares.

    Source: llama.cpp's architecture `dflash`.
    """

    taps: int
    group_size: int

    def factors(self, width: int) -> int:
        """The factors of a token: those before the block of the layer, and those after it."""
        return 2 * self.taps * (width // self.group_size)


@dataclass(frozen=True)
class ConvolvedInputSpec(StatelessSpec):
    """x ← convolution of norm(x), with factors W · norm(x). The block after this one reads x without a norm;
    `embedding.convolved_result` follows it. `name`: of the tensors, `attn` or `ffn`.
    """

    kind: ClassVar[str] = "embedding.convolved_input"
    is_divisible: ClassVar[bool] = False

    convolution: Convolution
    name: str

    def read(self, tensors: TensorReader) -> "ConvolvedInputWeights":
        width = tensors.hidden_size
        return ConvolvedInputWeights(
            tensors.matrix(f"{self.name}_conv_proj", self.convolution.factors(width), width),
            tensors.required(f"{self.name}_conv_base", 2 * self.convolution.taps * width),
        )

    def sizes(self, weights: "ConvolvedInputWeights", norms: NormLengths) -> "ConvolvedInputSizes":
        return ConvolvedInputSizes(MatrixSize.of(weights.projection))


@dataclass(frozen=True)
class ConvolvedInputWeights(BlockWeights):
    """The weights: W, and `base`, (2, taps, hidden_size): of the convolutions before and after a block."""

    kind: ClassVar[str] = "embedding.convolved_input"

    projection: Matrix
    base: Vector

    def matrices(self) -> list[Matrix]:
        return [self.projection]


@dataclass(frozen=True)
class ConvolvedInputSizes(BlockSizes):
    """The sizes of the projection."""

    label: ClassVar[str] = "convolution"
    has_device_kernels: ClassVar[bool] = False

    projection: MatrixSize

    def undivided(self) -> list[MatrixSize]:
        return [self.projection]

    def cpu_buffers(self, hidden_size: int) -> dict[str, int]:
        width = padded(hidden_size)
        return {
            ROWS: 4 * width,
            f"{ROWS}.quantized": quantized_bytes(width),
            FACTORS: 4 * padded(self.projection.rows),
            RESIDUAL: 4 * width,
            CONVOLVED: 4 * width,
        }

    def inputs(self) -> list[MatrixSize]:
        return [self.projection]

    def outputs(self) -> list[MatrixSize]:
        return []
