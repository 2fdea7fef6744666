"""A feed-forward of which few neurons are active: specification, weights and sizes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from edgeinfer_kernels.blocks.common.block import BlockWeights, StatelessSpec, TensorReader
from edgeinfer_kernels.blocks.common.block_sizes import BlockSizes, ChunkRows, NormLengths, StepShape
from edgeinfer_kernels.blocks.feed_forward import Activation
from edgeinfer_kernels.caches.layer_cache import padded
from edgeinfer_kernels.cpu.runtime.abi import CACHE_LINE, quantized_bytes
from edgeinfer_kernels.matrix import Matrix, MatrixSize
from edgeinfer_kernels.sizes.cuda_matrices import (
    activation_bytes,
    has_floats,
    matrix_bytes,
    padded_rows,
    taken,
    vector_bytes,
)


@dataclass(frozen=True)
class GaussianFeedForwardSpec(StatelessSpec):
    """down(activation(max(0, g - t)) · up(x)) with g = gate(x) and the threshold t = mean(g) + `deviations` ·
    deviation(g), the standard deviation with n - 1.

    If a token's gates are normally distributed, the share of active neurons depends on `deviations` only.
    """

    kind: ClassVar[str] = "gemma3n.gaussian_feed_forward"
    is_divisible: ClassVar[bool] = False

    activation: Activation
    neurons: int
    deviations: float

    def read(self, tensors: TensorReader) -> "GaussianFeedForwardWeights":
        width, neurons = tensors.hidden_size, self.neurons
        return GaussianFeedForwardWeights(
            tensors.matrix("ffn_gate", neurons, width),
            tensors.matrix("ffn_up", neurons, width),
            tensors.matrix("ffn_down", width, neurons),
        )

    def sizes(self, weights: "GaussianFeedForwardWeights", norms: NormLengths) -> "GaussianFeedForwardSizes":
        gate, up, down = map(MatrixSize.of, weights.matrices())
        return GaussianFeedForwardSizes(gate, up, down, norms.vectors)


@dataclass(frozen=True)
class GaussianFeedForwardWeights(BlockWeights):
    """The weights, by GGUF name."""

    kind: ClassVar[str] = "gemma3n.gaussian_feed_forward"

    ffn_gate: Matrix
    ffn_up: Matrix
    ffn_down: Matrix

    def matrices(self) -> list[Matrix]:
        return [self.ffn_gate, self.ffn_up, self.ffn_down]


@dataclass(frozen=True)
class GaussianFeedForwardSizes(BlockSizes):
    """The sizes of the matrices. `vectors`: lengths of the norms."""

    label: ClassVar[str] = "feed-forward"

    gate: MatrixSize
    up: MatrixSize
    down: MatrixSize
    vectors: tuple[int, ...] = ()

    def undivided(self) -> list[MatrixSize]:
        return [self.gate, self.up, self.down]

    def undivided_device_bytes(self) -> int:
        return sum(map(matrix_bytes, self.undivided())) + vector_bytes(self.vectors)

    def cpu_buffers(self, hidden_size: int) -> dict[str, int]:
        neurons = padded(self.up.rows)
        return {
            "hidden": 4 * neurons,
            "hidden.quantized": quantized_bytes(neurons),
            "gate": 4 * neurons,
            "threshold": CACHE_LINE,
        }

    def inputs(self) -> list[MatrixSize]:
        return [self.gate, self.up]

    def outputs(self) -> list[MatrixSize]:
        return [self.down]

    @classmethod
    def step_bytes(cls, blocks: Sequence["GaussianFeedForwardSizes"], step: StepShape) -> int:
        """The products of gate and up, and the hidden rows."""
        tokens, neurons = step.tokens, max(block.up.rows for block in blocks)
        floats = has_floats(block.down for block in blocks)
        return taken(2 * tokens * padded_rows(neurons), 4) + activation_bytes(tokens, neurons, floats)

    def chunk_rows(self, chunk: int, hidden_size: int) -> ChunkRows:
        return ChunkRows(chunk * self.up.rows, chunk, chunk * max(2 * self.up.rows, hidden_size))

    def streamed_vector_bytes(self) -> int:
        return vector_bytes(self.vectors)
