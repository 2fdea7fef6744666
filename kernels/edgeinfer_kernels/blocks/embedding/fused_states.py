"""The fused hidden states of a target, whose keys a block drafter reads: specification, weights and sizes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from edgeinfer_kernels.blocks.common.block import BlockWeights, NormSpec, StatelessSpec, TensorReader
from edgeinfer_kernels.blocks.common.block_sizes import BlockSizes, ChunkRows, NormLengths, StepShape
from edgeinfer_kernels.blocks.embedding.draft_input import STATES
from edgeinfer_kernels.caches.layer_cache import padded
from edgeinfer_kernels.cpu.runtime.abi import quantized_bytes
from edgeinfer_kernels.matrix import Matrix, MatrixSize, Vector
from edgeinfer_kernels.sizes.cuda_matrices import (
    activation_bytes,
    matrix_bytes,
    padded_rows,
    taken,
    vector_bytes,
)


@dataclass(frozen=True)
class FusedStatesSpec(StatelessSpec):
    """x ← norm(W_fc · h). h: the target's hidden states of a token after some of its layers, `features`
    elements together.

    Source: llama.cpp's architecture `dflash`.
    """

    kind: ClassVar[str] = "embedding.fused_states"
    is_divisible: ClassVar[bool] = False

    norm: NormSpec
    features: int

    def read(self, tensors: TensorReader) -> "FusedStatesWeights":
        width = tensors.hidden_size
        return FusedStatesWeights(
            tensors.model_matrix("fc", width, self.features),
            tensors.model_vector("enc.output_norm.weight", width),
        )

    def sizes(self, weights: "FusedStatesWeights", norms: NormLengths) -> "FusedStatesSizes":
        return FusedStatesSizes(MatrixSize.of(weights.fc))


@dataclass(frozen=True)
class FusedStatesWeights(BlockWeights):
    """The weights: W_fc, and those of the norm."""

    kind: ClassVar[str] = "embedding.fused_states"

    fc: Matrix
    norm: Vector

    def matrices(self) -> list[Matrix]:
        return [self.fc]


@dataclass(frozen=True)
class FusedStatesSizes(BlockSizes):
    """The sizes of the projection of the target's states."""

    label: ClassVar[str] = "draft input"

    fc: MatrixSize

    def undivided(self) -> list[MatrixSize]:
        return [self.fc]

    def undivided_device_bytes(self) -> int:
        return matrix_bytes(self.fc) + self.streamed_vector_bytes()

    def streamed_vector_bytes(self) -> int:
        return vector_bytes((self.fc.rows,))

    @classmethod
    def step_bytes(cls, blocks: Sequence["FusedStatesSizes"], step: StepShape) -> int:
        columns = (blocks[0].fc.columns, step.hidden_size)
        activations = sum(activation_bytes(step.tokens, each, step.input_floats) for each in columns)
        return activations + taken(step.tokens * padded_rows(step.hidden_size), 4)

    def chunk_rows(self, chunk: int, hidden_size: int) -> ChunkRows:
        return ChunkRows(chunk * self.fc.columns, chunk, chunk * hidden_size)

    def cpu_buffers(self, hidden_size: int) -> dict[str, int]:
        states = padded(self.fc.columns)
        return {STATES: 4 * states, f"{STATES}.quantized": quantized_bytes(states)}

    def inputs(self) -> list[MatrixSize]:
        return [self.fc]

    def outputs(self) -> list[MatrixSize]:
        return []
