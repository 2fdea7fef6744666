"""The input of an EAGLE-3 head, a token and hidden states of its target: specification, weights and sizes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from edgeinfer_kernels.blocks.common.block import BlockWeights, NormSpec, StatelessSpec, TensorReader
from edgeinfer_kernels.blocks.common.block_sizes import BlockSizes, ChunkRows, NormLengths, StepShape
from edgeinfer_kernels.blocks.embedding.draft_input import PAIR, STATES
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

OWN_STATES = "own states"
"""The buffer of the fused states g of a step."""


@dataclass(frozen=True)
class EagleInputSpec(StatelessSpec):
    """x ← g, and [norm(x); norm(g)] is what the attention after this block reads; the layer's first block.

    x: the embedding of a token. g = W_fc · h; h: the target's hidden states after some of its layers before
    this token, `features` elements together. For a token after a drafted one g is x after the head's layer.
    `norm_before_fc`: h is normalized. `norm_before_residual`: x ← norm(g).
    Source: Li et al. 2025, "EAGLE-3" (arXiv:2503.01840).
    """

    kind: ClassVar[str] = "embedding.eagle_input"
    is_divisible: ClassVar[bool] = False

    norm: NormSpec
    features: int
    norm_before_fc: bool = False
    norm_before_residual: bool = False

    def read(self, tensors: TensorReader) -> "EagleInputWeights":
        width, features = tensors.hidden_size, self.features
        return EagleInputWeights(
            tensors.model_matrix("fc", width, features),
            tensors.required("attn_norm.weight", width),
            tensors.required("attn_norm_2.weight", width),
            tensors.model_vector("enc.output_norm.weight", features) if self.norm_before_fc else None,
        )

    def sizes(self, weights: "EagleInputWeights", norms: NormLengths) -> "EagleInputSizes":
        return EagleInputSizes(MatrixSize.of(weights.fc), self.norm_before_fc)


@dataclass(frozen=True)
class EagleInputWeights(BlockWeights):
    """The weights: W_fc, and the norms of x, of g and of h."""

    kind: ClassVar[str] = "embedding.eagle_input"

    fc: Matrix
    enorm: Vector
    hnorm: Vector
    feature_norm: Vector | None = None

    def matrices(self) -> list[Matrix]:
        return [self.fc]


@dataclass(frozen=True)
class EagleInputSizes(BlockSizes):
    """The sizes of the projection of the target's states."""

    label: ClassVar[str] = "draft input"

    fc: MatrixSize
    has_feature_norm: bool = False

    def undivided(self) -> list[MatrixSize]:
        return [self.fc]

    def undivided_device_bytes(self) -> int:
        return matrix_bytes(self.fc) + self.streamed_vector_bytes()

    def streamed_vector_bytes(self) -> int:
        lengths = (self.fc.rows, self.fc.rows, *([self.fc.columns] if self.has_feature_norm else []))
        return vector_bytes(lengths)

    @classmethod
    def step_bytes(cls, blocks: Sequence["EagleInputSizes"], step: StepShape) -> int:
        features, width = blocks[0].fc.columns, step.hidden_size
        columns = (features, 2 * width)
        activations = sum(activation_bytes(step.tokens, each, step.input_floats) for each in columns)
        floats = ((1 + step.tokens) * width, step.tokens * padded_rows(width))
        return activations + sum(taken(count, 4) for count in floats)

    def chunk_rows(self, chunk: int, hidden_size: int) -> ChunkRows:
        return ChunkRows(chunk * max(self.fc.columns, 2 * hidden_size), chunk, chunk * hidden_size)

    def cpu_buffers(self, hidden_size: int) -> dict[str, int]:
        # The second half of a pair begins where the first ends, and is padded by itself.
        pair, states = 2 * padded(hidden_size) + 16, padded(self.fc.columns)
        return {
            STATES: 4 * states,
            f"{STATES}.quantized": quantized_bytes(states),
            OWN_STATES: 4 * padded(hidden_size),
            PAIR: 4 * pair,
            f"{PAIR}.quantized": quantized_bytes(pair),
        }

    def inputs(self) -> list[MatrixSize]:
        return [self.fc]

    def outputs(self) -> list[MatrixSize]:
        return []
