"""The end of a layer: the input from the per-layer embeddings and the layer's scale; specification, weights
and sizes of one block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from edgeinfer_kernels.blocks.common.block import BlockWeights, NormSpec, StatelessSpec, TensorReader
from edgeinfer_kernels.blocks.common.block_sizes import BlockSizes, ChunkRows, NormLengths, StepShape
from edgeinfer_kernels.blocks.feed_forward import Activation
from edgeinfer_kernels.caches.layer_cache import padded
from edgeinfer_kernels.cpu.runtime.abi import quantized_bytes
from edgeinfer_kernels.matrix import Matrix, MatrixSize, Vector, vector_lengths
from edgeinfer_kernels.sizes.cuda_matrices import (
    activation_bytes,
    has_floats,
    matrix_bytes,
    padded_rows,
    taken,
    vector_bytes,
)


@dataclass(frozen=True)
class LayerOutputSpec(StatelessSpec):
    """x ← s · (x + norm(W_proj · (activation(W_gate · x) ⊙ e))), with the layer's scale s.

    e: the layer's `width` elements of the token's per-layer inputs (rms(W · x₀ / √d) + √width · t) / √2: the
    norm is of each layer's elements, x₀ the scaled embedding of d elements and t the token's row of the
    per-layer embeddings. The first layer's block computes them for all `layers`. width 0: x ← s · x.
    """

    kind: ClassVar[str] = "layer_output"
    is_divisible: ClassVar[bool] = False

    norm: NormSpec
    layer: int
    layers: int
    width: int = 0
    activation: Activation = "gelu"

    @property
    def columns(self) -> int:
        """Elements of a token's per-layer inputs for all layers."""
        return self.layers * self.width

    @property
    def is_first(self) -> bool:
        """Whether the block computes the per-layer inputs."""
        return self.width > 0 and self.layer == 0

    def read(self, tensors: TensorReader) -> "LayerOutputWeights":
        scale = tensors.vector("layer_output_scale.weight", 1)
        factor = 1.0 if scale is None else float(scale[0])
        if not self.width:
            return LayerOutputWeights(factor)
        hidden, width = tensors.hidden_size, self.width
        return LayerOutputWeights(
            factor,
            inp_gate=tensors.matrix("inp_gate", width, hidden),
            proj=tensors.matrix("proj", hidden, width),
            post_norm=tensors.required("post_norm.weight", hidden),
            model_proj=tensors.model_matrix("per_layer_model_proj", self.columns, hidden)
            if self.is_first
            else None,
            proj_norm=tensors.model_vector("per_layer_proj_norm.weight", width) if self.is_first else None,
        )

    def sizes(self, weights: "LayerOutputWeights", norms: NormLengths) -> "LayerOutputSizes":
        vectors = vector_lengths(weights.post_norm, weights.proj_norm)
        return LayerOutputSizes(self, tuple(map(MatrixSize.of, weights.matrices())), vectors)


@dataclass(frozen=True)
class LayerOutputWeights(BlockWeights):
    """The weights, by GGUF name; `model_proj` and `proj_norm` only in the first layer."""

    kind: ClassVar[str] = "layer_output"

    scale: float
    inp_gate: Matrix | None = None
    proj: Matrix | None = None
    post_norm: Vector | None = None
    model_proj: Matrix | None = None
    proj_norm: Vector | None = None

    def matrices(self) -> list[Matrix]:
        return [each for each in (self.inp_gate, self.proj, self.model_proj) if each is not None]


@dataclass(frozen=True)
class LayerOutputSizes(BlockSizes):
    """The sizes of the end of a layer. `each`: its matrices in the order of `LayerOutputWeights.matrices`."""

    label: ClassVar[str] = "layer output"

    spec: LayerOutputSpec
    each: tuple[MatrixSize, ...] = ()
    vectors: tuple[int, ...] = ()

    @property
    def reads_other_layers(self) -> bool:  # type: ignore[override]
        """Per-layer inputs are computed in the first layer."""
        return self.spec.width > 0

    def undivided(self) -> list[MatrixSize]:
        return list(self.each)

    def undivided_device_bytes(self) -> int:
        return sum(map(matrix_bytes, self.each)) + vector_bytes(self.vectors)

    def cpu_buffers(self, hidden_size: int) -> dict[str, int]:
        if not self.spec.width:
            return {}
        hidden = padded(self.spec.width)
        return {
            "per_layer": 4 * padded(self.spec.columns),
            "per_layer.projected": 4 * padded(self.spec.columns),
            "hidden": 4 * hidden,
            "hidden.quantized": quantized_bytes(hidden),
        }

    def inputs(self) -> list[MatrixSize]:
        return [*self.each[:1], *self.each[2:]]

    def outputs(self) -> list[MatrixSize]:
        return list(self.each[1:2])

    @classmethod
    def step_bytes(cls, blocks: Sequence["LayerOutputSizes"], step: StepShape) -> int:
        width, columns = (max(getattr(block.spec, name) for block in blocks) for name in ("width", "columns"))
        hidden = activation_bytes(
            step.tokens, width, has_floats(m for block in blocks for m in block.outputs())
        )
        floats = padded_rows(width), padded_rows(columns), columns
        numbers = taken(3, 8)
        return hidden + numbers + sum(taken(step.tokens * count, 4) for count in floats)

    @classmethod
    def prompt_bytes(cls, blocks: Sequence["LayerOutputSizes"], chunk: int, hidden_size: int) -> int:
        """The per-layer inputs."""
        return taken(chunk * max(block.spec.columns for block in blocks), 4)

    def chunk_rows(self, chunk: int, hidden_size: int) -> ChunkRows:
        spec = self.spec
        products = spec.columns if spec.is_first else spec.width
        return ChunkRows(chunk * spec.width, chunk, chunk * max(products, hidden_size))

    def streamed_vector_bytes(self) -> int:
        return vector_bytes(self.vectors)
