"""A feed-forward of which few neurons are active: specification, weights and sizes."""

from dataclasses import dataclass
from typing import ClassVar

from edgeinfer_kernels.blocks.common.block import (
    BlockSizes,
    NormLengths,
    StatelessSpec,
    TensorReader,
)
from edgeinfer_kernels.blocks.feed_forward import Activation
from edgeinfer_kernels.blocks.gemma3n import CPU_ONLY
from edgeinfer_kernels.cpu.runtime.abi import CACHE_LINE, quantized_bytes
from edgeinfer_kernels.cuda.weights.plane_formats import UnsupportedOnDeviceError
from edgeinfer_kernels.layer_cache import padded
from edgeinfer_kernels.matrix import Matrix, MatrixSize


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
        return GaussianFeedForwardSizes(*map(MatrixSize.of, weights.matrices()))


@dataclass(frozen=True)
class GaussianFeedForwardWeights:
    """The weights, by GGUF name."""

    kind: ClassVar[str] = "gemma3n.gaussian_feed_forward"

    ffn_gate: Matrix
    ffn_up: Matrix
    ffn_down: Matrix

    def matrices(self) -> list[Matrix]:
        return [self.ffn_gate, self.ffn_up, self.ffn_down]

    def granule_matrices(self) -> list[Matrix]:
        return self.matrices()


@dataclass(frozen=True)
class GaussianFeedForwardSizes(BlockSizes):
    """The sizes of the matrices."""

    label: ClassVar[str] = "feed-forward"
    cpu_only: ClassVar[str] = CPU_ONLY

    gate: MatrixSize
    up: MatrixSize
    down: MatrixSize

    def undivided(self) -> list[MatrixSize]:
        return [self.gate, self.up, self.down]

    def undivided_device_bytes(self) -> int:
        raise UnsupportedOnDeviceError(CPU_ONLY)

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
