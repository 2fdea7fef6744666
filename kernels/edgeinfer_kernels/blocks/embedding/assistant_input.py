"""The input of a Gemma 4 assistant, a token and a hidden state of its target: specification and sizes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from edgeinfer_kernels.blocks.common.block import BlockWeights, StatelessSpec, TensorReader
from edgeinfer_kernels.blocks.common.block_sizes import BlockSizes, NormLengths, StepShape
from edgeinfer_kernels.blocks.embedding.draft_input import STATES
from edgeinfer_kernels.blocks.embedding.eagle_input import OWN_STATES
from edgeinfer_kernels.caches.layer_cache import padded
from edgeinfer_kernels.cpu.runtime.abi import quantized_bytes
from edgeinfer_kernels.matrix import Matrix, MatrixSize
from edgeinfer_kernels.sizes.cuda_matrices import activation_bytes, matrix_bytes, padded_rows, taken


@dataclass(frozen=True)
class AssistantInputSpec(StatelessSpec):
    """x ← W_pre · [e; h]; the first block of the first layer.

    e: the target's scaled embedding of a token, h: the target's hidden state before it, after the output
    norm; both have `target_width` elements. For a token after a drafted one h = W_post · norm(x) of the step
    before, with the assistant's last norm.
    """

    kind: ClassVar[str] = "embedding.assistant_input"
    is_divisible: ClassVar[bool] = False

    target_width: int

    def read(self, tensors: TensorReader) -> "AssistantInputWeights":
        width = tensors.hidden_size
        return AssistantInputWeights(
            tensors.model_matrix("nextn.pre_projection", width, 2 * self.target_width),
            tensors.model_matrix("nextn.post_projection", self.target_width, width),
        )

    def sizes(self, weights: "AssistantInputWeights", norms: NormLengths) -> "AssistantInputSizes":
        return AssistantInputSizes(MatrixSize.of(weights.pre), MatrixSize.of(weights.post))


@dataclass(frozen=True)
class AssistantInputWeights(BlockWeights):
    """W_pre and W_post."""

    kind: ClassVar[str] = "embedding.assistant_input"

    pre: Matrix
    post: Matrix

    def matrices(self) -> list[Matrix]:
        return [self.pre, self.post]


@dataclass(frozen=True)
class AssistantInputSizes(BlockSizes):
    """The sizes of both projections."""

    label: ClassVar[str] = "draft input"

    pre: MatrixSize
    post: MatrixSize

    def undivided(self) -> list[MatrixSize]:
        return [self.pre, self.post]

    def undivided_device_bytes(self) -> int:
        return matrix_bytes(self.pre) + matrix_bytes(self.post)

    @classmethod
    def step_bytes(cls, blocks: Sequence["AssistantInputSizes"], step: StepShape) -> int:
        (width,) = {block.post.rows for block in blocks}
        columns = step.hidden_size, 2 * width
        activations = sum(activation_bytes(1, each, step.input_floats) for each in columns)
        return activations + taken(2 * step.hidden_size, 4) + taken(padded_rows(width), 4)

    def cpu_buffers(self, hidden_size: int) -> dict[str, int]:
        # The rows of W_post end with those of a whole group.
        states, own = padded(self.pre.columns) + 16, padded(hidden_size)
        return {
            STATES: 4 * states,
            f"{STATES}.quantized": quantized_bytes(states),
            OWN_STATES: 4 * own,
            f"{OWN_STATES}.quantized": quantized_bytes(own),
        }

    def inputs(self) -> list[MatrixSize]:
        return [self.pre, self.post]

    def outputs(self) -> list[MatrixSize]:
        return []
