"""Attention of an encoder, in which a text's tokens attend to all of it: specification, weights and sizes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.blocks.attention import AttentionSizes, AttentionSpec, AttentionWeights
from edgeinfer_kernels.blocks.common.alibi import MAX_ALIBI_BIAS, alibi_slopes
from edgeinfer_kernels.blocks.common.block import BlockWeights, NormSpec, StatelessSpec, TensorReader
from edgeinfer_kernels.blocks.common.block_sizes import BlockSizes, ChunkRows, NormLengths
from edgeinfer_kernels.blocks.common.projections import any_of
from edgeinfer_kernels.blocks.common.rope import RopeSpec
from edgeinfer_kernels.caches.layer_cache import padded
from edgeinfer_kernels.cpu.runtime.abi import encoder_scratch, quantized_bytes
from edgeinfer_kernels.cuda.weights.plane_formats import UnsupportedOnDeviceError
from edgeinfer_kernels.matrix import Matrix, MatrixSize, Vector, vector_lengths
from edgeinfer_kernels.sizes.cuda_matrices import taken, vector_bytes

CPU_TEXT_TOKENS = 512
"""Tokens of a step with several texts on the CPU: more don't fit the caches as well."""
GPU_TEXT_TOKENS = 4096
"""Tokens of a step with several texts on a GPU: fewer take less time than to launch the kernels."""
TILE_WORDS = 3
"""Words that describe a tile of tokens of one text on a GPU."""


@dataclass(frozen=True)
class EncoderAttentionSpec(StatelessSpec):
    """Attention of one layer within each of the texts of a step; there is no cache. `norm`: of queries and
    keys, whole rows or heads. `window`: a token attends to the tokens at most window // 2 positions away; 0:
    no limit. `alibi`: slope · |distance| is subtracted from a score.
    """

    kind: ClassVar[str] = "encoder_attention"
    is_divisible: ClassVar[bool] = False

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    norm: NormSpec
    rope: RopeSpec | None
    qk_norm: Literal["none", "head", "row"] = "none"
    window: int = 0
    alibi: bool = False

    def slopes(self) -> npt.NDArray[np.float32]:
        """(heads,): the slopes of ALiBi; 0 without."""
        return alibi_slopes(self.heads, MAX_ALIBI_BIAS if self.alibi else 0.0)

    @property
    def projections(self) -> AttentionSpec:
        """The attention with the same heads and projections."""
        return AttentionSpec(
            self.heads, self.kv_heads, self.head_dim, self.scale, self.norm, self.rope, self.qk_norm
        )

    def read(self, tensors: TensorReader) -> "EncoderAttentionWeights":
        attention = self.projections.read(tensors)
        bias: list[Vector | None] = [None, None]
        if self.qk_norm == "row":
            rows = attention.attn_q.rows, attention.attn_k.rows
            names = "attn_q_norm.bias", "attn_k_norm.bias"
            bias = [tensors.vector(name, count) for name, count in zip(names, rows, strict=True)]
        return EncoderAttentionWeights(attention, *bias)

    def sizes(self, weights: "EncoderAttentionWeights", norms: NormLengths) -> "EncoderAttentionSizes":
        w = weights.attention
        biases = w.attn_q_bias, w.attn_k_bias, w.attn_v_bias, w.attn_output_bias
        others = w.attn_q_norm, w.attn_k_norm, weights.q_norm_bias, weights.k_norm_bias
        vectors = (*norms.vectors, *vector_lengths(*biases, *others))
        q, k, v, output = map(MatrixSize.of, w.matrices())
        on_device = self.projections.sizes(w, norms)
        return EncoderAttentionSizes(self, q, k, v, output, on_device, vectors, any_of(biases[:3]))


@dataclass(frozen=True)
class EncoderAttentionWeights(BlockWeights):
    """The weights of attention, and the biases of the norms of queries and keys."""

    kind: ClassVar[str] = "encoder_attention"

    attention: AttentionWeights
    q_norm_bias: Vector | None = None
    k_norm_bias: Vector | None = None

    def matrices(self) -> list[Matrix]:
        return self.attention.matrices()


@dataclass(frozen=True)
class EncoderAttentionSizes(BlockSizes):
    """The sizes of an encoder's attention. `on_device`: those of its projections on a GPU. `vectors`: lengths
    of norms and biases.
    """

    label: ClassVar[str] = "attention"
    needs_whole_model: ClassVar[bool] = True

    spec: EncoderAttentionSpec
    q: MatrixSize
    k: MatrixSize
    v: MatrixSize
    output: MatrixSize
    on_device: AttentionSizes
    vectors: tuple[int, ...] = ()
    biased: bool = False

    def undivided(self) -> list[MatrixSize]:
        return [self.q, self.k, self.v, self.output]

    def undivided_device_bytes(self) -> int:
        if self.spec.qk_norm == "row":
            raise UnsupportedOnDeviceError(f"{self.q.name}: queries with a norm of whole rows")
        slopes = vector_bytes((self.spec.heads,)) if self.spec.alibi else 0
        return self.on_device.undivided_device_bytes() + slopes

    def state_operations(self, tokens: int, start: int) -> float:
        seen = min(tokens, self.spec.window or tokens)
        return 4 * tokens * seen * self.spec.heads * self.spec.head_dim

    def cpu_buffers(self, hidden_size: int) -> dict[str, int]:
        columns, head = self.spec.heads * self.spec.head_dim, padded(self.spec.head_dim)
        return {
            "attn_out": 4 * padded(columns),
            "attn_out.quantized": quantized_bytes(padded(columns)),
            "projected_q": 4 * padded(self.q.rows),
            "projected_k": 4 * padded(self.k.rows),
            "projected_v": 4 * padded(self.v.rows),
            "encoder_queries": 4 * self.spec.heads * head,
            "encoder_keys": 4 * self.spec.kv_heads * head,
            "encoder_values": 4 * self.spec.kv_heads * head,
            TEXT_BOUNDS: 16,
        }

    def cpu_scratch(self) -> int:
        return encoder_scratch(padded(self.spec.head_dim))

    def inputs(self) -> list[MatrixSize]:
        return [self.q, self.k, self.v]

    def stacked_inputs(self) -> list[MatrixSize]:
        return self.on_device.stacked_inputs()

    def chunk_rows(self, chunk: int, hidden_size: int) -> ChunkRows:
        return self.on_device.chunk_rows(chunk, hidden_size)

    @classmethod
    def prompt_bytes(cls, blocks: Sequence["EncoderAttentionSizes"], chunk: int, hidden_size: int) -> int:
        """Queries, keys, values and results in float16; positions and tiles of the texts."""
        columns = max(block.spec.heads * block.spec.head_dim for block in blocks)
        cached = max(block.spec.kv_heads * block.spec.head_dim for block in blocks)
        texts = taken(chunk, 4) + taken(TILE_WORDS * chunk, 4)
        return 2 * taken(chunk * columns, 2) + 2 * taken(chunk * cached, 2) + texts

    def outputs(self) -> list[MatrixSize]:
        return [self.output]

    def rope_table(self) -> tuple[RopeSpec | None, int] | None:
        return self.spec.rope, self.spec.head_dim

    def streamed_vector_bytes(self) -> int:
        return vector_bytes(self.vectors)


TEXT_BOUNDS = "text_bounds"
"""The buffer with the first row of a token's text and the row after its last one, int64."""


def text_bounds(lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """(tokens, 2) int64: for each token of texts of these lengths, one after another, the first row of its
    text, and the row after the last one.
    """
    ends = np.cumsum(lengths)
    return np.repeat(np.stack([ends - lengths, ends], axis=1), lengths, axis=0)
