"""Multi-head latent attention (MLA): specification, weights, latent cache and sizes of one block.

All heads share one key of each position: a latent vector and a part with RoPE. The value is the latent vector
too. W_k of a head is multiplied with its query and W_v with its result, so neither keys nor values of heads
exist. Source: DeepSeek-AI 2024, "DeepSeek-V2", §2.1 and Appendix C.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.blocks.common.block import BlockWeights, NormSpec, TensorReader
from edgeinfer_kernels.blocks.common.block_sizes import BlockSizes, ChunkRows, NormLengths, StepShape
from edgeinfer_kernels.blocks.common.rope import RopeSpec
from edgeinfer_kernels.blocks.common.temperature import NO_TEMPERATURE, Temperature
from edgeinfer_kernels.caches.cache_state import CacheState
from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.caches.latent_cache import LatentCache, latent_type
from edgeinfer_kernels.caches.layer_cache import padded
from edgeinfer_kernels.cpu.runtime.abi import (
    LATENT_PIECES_PER_THREAD,
    attention_pieces,
    attention_scratch,
    attention_states,
    quantized_bytes,
)
from edgeinfer_kernels.cuda.tuning.step_shapes import MAX_SPLITS, latent_rows, latent_splits
from edgeinfer_kernels.cuda.weights.plane_formats import ROW_MULTIPLE, UnsupportedOnDeviceError
from edgeinfer_kernels.matrix import Matrix, MatrixSize, Vector, vector_lengths
from edgeinfer_kernels.sizes.cuda_matrices import (
    activation_bytes,
    cache_bytes,
    cache_positions,
    has_floats,
    head_dimensions,
    matrix_bytes,
    padded_rows,
    recent_device_bytes,
    row_runs,
    taken,
    vector_bytes,
)

MAX_DEVICE_LATENT = 512
"""Maximum elements of a latent vector on a GPU."""


@dataclass(frozen=True)
class LatentAttentionSpec:
    """Latent attention of one layer. A head's query has `nope_dim` elements without RoPE, then `rope_dim`
    with it; its value has `value_dim`. A cached row has `latent_dim` elements, then `rope_dim`. `norm`: of
    the latent vector, and of the query's low-rank projection if `query_rank` isn't 0. `rope` None: there is
    no RoPE, and the last elements are used as they are. `temperature`: of the queries.
    """

    kind: ClassVar[str] = "latent_attention"
    is_divisible: ClassVar[bool] = False
    kv_heads: ClassVar[int] = 1
    source_layer: ClassVar[None] = None
    window: ClassVar[int] = 0
    chunked: ClassVar[bool] = False
    soft_cap: ClassVar[float] = 0.0
    alibi: ClassVar[float] = 0.0

    heads: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    latent_dim: int
    scale: float
    norm: NormSpec
    rope: RopeSpec | None
    query_rank: int = 0
    temperature: Temperature = NO_TEMPERATURE

    @property
    def head_shape(self) -> tuple[int, ...]:
        return self.heads, self.latent_dim, self.rope_dim

    @property
    def recurrent(self) -> None:
        return None

    @property
    def query_dim(self) -> int:
        """Elements of a head's query before the multiplication with W_k."""
        return self.nope_dim + self.rope_dim

    @property
    def head_dim(self) -> int:
        """As `cached_dim`: elements of a key."""
        return self.cached_dim

    @property
    def cached_dim(self) -> int:
        """Elements of a cached row, and of a head's query after the multiplication."""
        return self.latent_dim + self.rope_dim

    def read(self, tensors: TensorReader) -> "LatentAttentionWeights":
        width, rows, rank = tensors.hidden_size, self.heads * self.query_dim, self.query_rank
        q_norm = tensors.required("attn_q_a_norm.weight", rank) if rank else None
        keys, values = self._keys_and_values(tensors)
        return LatentAttentionWeights(
            attn_q_a=tensors.matrix("attn_q_a", rank, width) if rank else None,
            attn_q=tensors.matrix("attn_q_b", rows, rank) if rank else tensors.matrix("attn_q", rows, width),
            attn_kv_a=tensors.matrix("attn_kv_a_mqa", self.cached_dim, width),
            attn_k_b=keys,
            attn_v_b=values,
            attn_output=tensors.matrix("attn_output", width, self.heads * self.value_dim),
            attn_q_a_norm=q_norm,
            attn_kv_a_norm=tensors.required("attn_kv_a_norm.weight", self.latent_dim),
        )

    def _keys_and_values(self, tensors: TensorReader) -> tuple[Matrix, Matrix]:
        """W_k transposed and W_v of all heads. Older files have one tensor with W_k and W_v of each head; its
        W_k becomes float16.
        """
        rows = self.nope_dim + self.value_dim
        both = tensors.matrix_or_none("attn_kv_b", self.heads * rows, self.latent_dim)
        if both is None:
            keys = tensors.experts("attn_k_b", self.heads, self.latent_dim, self.nope_dim)
            values = tensors.experts("attn_v_b", self.heads, self.value_dim, self.latent_dim)
            return _stacked(keys), _stacked(values)
        order = np.arange(self.heads * rows).reshape(self.heads, rows)
        keys = both.reordered(order[:, : self.nope_dim].reshape(-1))
        turned = keys.decoded().reshape(self.heads, self.nope_dim, -1).swapaxes(1, 2).astype(np.float16)
        raw = turned.reshape(-1, self.nope_dim).view(np.uint8)
        transposed = Matrix(both.name, "F16", self.heads * self.latent_dim, self.nope_dim, raw)
        return transposed, both.reordered(order[:, self.nope_dim :].reshape(-1))

    def sizes(self, weights: "LatentAttentionWeights", norms: NormLengths) -> "LatentAttentionSizes":
        w = weights
        q_a = None if w.attn_q_a is None else MatrixSize.of(w.attn_q_a)
        matrices = w.attn_q, w.attn_kv_a, w.attn_k_b, w.attn_v_b, w.attn_output
        q, kv_a, k_b, v_b, output = map(MatrixSize.of, matrices)
        vectors = (*norms.vectors, *vector_lengths(w.attn_q_a_norm, w.attn_kv_a_norm))
        return LatentAttentionSizes(self, q_a, q, kv_a, k_b, v_b, output, vectors)

    def state_nbytes(self, context: int, cache_type: CacheType) -> int:
        """Bytes of the latent cache in main memory."""
        return LatentCache.nbytes_for(self, context, cache_type)

    def allocate_state(self, context: int, cache_type: CacheType) -> "LatentAttentionState":
        return LatentAttentionState(self, LatentCache.allocate(self, context, cache_type))


def _stacked(matrices: Matrix) -> Matrix:
    """The matrices of all heads as one, with their rows one after the other."""
    return replace(matrices, rows=matrices.experts * matrices.rows, experts=1)


@dataclass(frozen=True)
class LatentAttentionWeights(BlockWeights):
    """The weights of a latent attention block. attn_q: W_q, or the second factor if attn_q_a is the first.
    attn_k_b (heads · latent_dim, nope_dim), attn_v_b (heads · value_dim, latent_dim): W_k transposed and W_v
    of all heads.
    """

    kind: ClassVar[str] = "latent_attention"

    attn_q_a: Matrix | None
    attn_q: Matrix
    attn_kv_a: Matrix
    attn_k_b: Matrix
    attn_v_b: Matrix
    attn_output: Matrix
    attn_q_a_norm: Vector | None
    attn_kv_a_norm: Vector

    def matrices(self) -> list[Matrix]:
        first = [] if self.attn_q_a is None else [self.attn_q_a]
        return [*first, self.attn_q, self.attn_kv_a, self.attn_k_b, self.attn_v_b, self.attn_output]


@dataclass(frozen=True)
class LatentAttentionState(CacheState):
    """The latent cache of one block, in main memory."""

    spec: LatentAttentionSpec
    cache: LatentCache

    def keys(self, end: int) -> npt.NDArray[np.float32]:
        return self.cache.read(0, end)[None].astype(np.float32)

    def in_key_basis(self, queries: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return self.cache.hadamard(queries) if self.cache.has_hadamard_rows else queries

    def rotated(self, first: int, last: int) -> npt.NDArray[np.floating]:
        return self.cache.read(first, last)[None, :, self.spec.latent_dim :]

    def store_rotated(self, first: int, keys: npt.NDArray[np.floating]) -> None:
        self.cache.write_part(first, keys[0], self.spec.latent_dim)


@dataclass(frozen=True)
class LatentAttentionSizes(BlockSizes):
    """The sizes of a latent attention block. `vectors`: lengths of its norms."""

    label: ClassVar[str] = "latent attention"
    state_label: ClassVar[str] = "keys and values"

    spec: LatentAttentionSpec
    q_a: MatrixSize | None
    q: MatrixSize
    kv_a: MatrixSize
    k_b: MatrixSize
    v_b: MatrixSize
    output: MatrixSize
    vectors: tuple[int, ...] = ()

    def undivided(self) -> list[MatrixSize]:
        return [*self.inputs(), *self.inner(), self.output]

    def undivided_device_bytes(self) -> int:
        """Without the RoPE table, which layers share."""
        check_device_sizes(self.spec, self.kv_a.name)
        matrices = [*self.stacked_inputs(), *self.inner(), self.output]
        return sum(map(matrix_bytes, matrices)) + vector_bytes(self.vectors)

    def rope_table(self) -> tuple[RopeSpec | None, int] | None:
        return (self.spec.rope, self.spec.rope_dim) if self.spec.rope else None

    def state_bytes(self, context: int, cache_type: CacheType) -> int:
        return self.spec.state_nbytes(context, cache_type)

    def state_device_bytes(self, context: int, cache_type: CacheType) -> int:
        """Of the latent vectors, and of the parts with RoPE."""
        rows, kind = cache_positions(context), latent_type(cache_type)
        widths = self.spec.latent_dim, self.spec.rope_dim
        recent = recent_device_bytes(1, widths, context, cache_type)
        return recent + sum(cache_bytes(rows, width, kind) for width in widths)

    def has_device_pages(self, context: int) -> bool:
        return True

    def state_share(self, depth: int, context: int) -> float:
        return depth / context

    def state_operations(self, tokens: int, start: int) -> float:
        spec = self.spec
        return 2 * tokens * (start + tokens / 2) * spec.heads * (spec.cached_dim + spec.latent_dim)

    def cpu_buffers(self, hidden_size: int) -> dict[str, int]:
        spec = self.spec
        rows = {
            "query_latents": spec.query_rank,
            "nope_queries": spec.heads * spec.nope_dim,
            "head_latents": spec.heads * spec.latent_dim,
            "attn_out": spec.heads * spec.value_dim,
        }
        return {
            **{name: 4 * padded(count) for name, count in rows.items()},
            **{f"{name}.quantized": quantized_bytes(padded(count)) for name, count in rows.items()},
            "projected_q": 4 * padded(self.q.rows),
            "projected_k": 4 * padded(spec.cached_dim),
            "queries": 4 * spec.heads * padded(spec.cached_dim),
        }

    def cpu_scratch(self) -> int:
        return attention_scratch(self.spec.heads, padded(self.spec.cached_dim))

    def cpu_states(self, threads: int) -> int:
        """The running sums of attention over KV splits."""
        pieces = attention_pieces(threads, 1, LATENT_PIECES_PER_THREAD)
        return attention_states(self.spec.heads, self.spec.latent_dim) * pieces

    def inputs(self) -> list[MatrixSize]:
        return [self.q if self.q_a is None else self.q_a, self.kv_a]

    def stacked_inputs(self) -> list[MatrixSize]:
        return row_runs(self.inputs())

    def inner(self) -> list[MatrixSize]:
        return [*([] if self.q_a is None else [self.q]), self.k_b, self.v_b]

    def outputs(self) -> list[MatrixSize]:
        return [self.output]

    @classmethod
    def step_bytes(cls, blocks: Sequence["LatentAttentionSizes"], step: StepShape) -> int:
        """Activations; projections and the second one of queries; queries and their part with RoPE; the
        results of KV splits.
        """
        specs, tokens = [block.spec for block in blocks], step.tokens
        heads = max(spec.heads for spec in specs)
        activations = [
            (max(spec.query_rank for spec in specs), 1, [block.q for block in blocks if block.q_a]),
            (max(spec.nope_dim for spec in specs), heads, [block.k_b for block in blocks]),
            (max(spec.latent_dim for spec in specs), heads, [block.v_b for block in blocks]),
            (max(spec.heads * spec.value_dim for spec in specs), 1, [block.output for block in blocks]),
        ]
        words = (
            activation_bytes(tokens, columns, has_floats(readers), rows)
            for columns, rows, readers in activations
            if columns
        )
        stacks = [sum(padded_rows(run.rows) for run in block.stacked_inputs()) for block in blocks]
        rows = max(latent_parts(spec, tokens) for spec in specs)
        floats = [
            tokens * max(stacks),
            tokens * max((padded_rows(block.q.rows) for block in blocks if block.q_a), default=0),
            tokens * max(spec.heads * spec.latent_dim for spec in specs),
            tokens * max(spec.heads * spec.rope_dim for spec in specs),
            rows * max(head_dimensions(spec.latent_dim) for spec in specs),
            2 * rows,
        ]
        return sum(words) + sum(taken(count, 4) for count in floats)

    @classmethod
    def prompt_bytes(cls, blocks: Sequence["LatentAttentionSizes"], chunk: int, hidden_size: int) -> int:
        """The queries' parts without and with RoPE, the queries, and the results of the heads, in float16."""
        columns = [
            max(block.spec.heads * getattr(block.spec, name) for block in blocks)
            for name in ("nope_dim", "rope_dim", "latent_dim", "value_dim")
        ]
        return sum(taken(chunk * count, 2) for count in columns)

    def chunk_rows(self, chunk: int, hidden_size: int) -> ChunkRows:
        spec = self.spec
        rows = max(hidden_size, self.q.rows, sum(matrix.rows for matrix in self.inputs()))
        return ChunkRows(chunk * spec.query_rank, chunk, chunk * rows)

    def streamed_vector_bytes(self) -> int:
        """With the orders of rows, those of a query head and of a cached row."""
        orders = (self.spec.query_dim, self.spec.cached_dim)
        return vector_bytes(self.vectors) + sum(taken(length, 8) for length in orders)

    @classmethod
    def streamed_state_bytes(cls, blocks: Sequence["LatentAttentionSizes"], context: int) -> int:
        """The cache of the largest block, in float16."""
        positions = cache_positions(context)
        widths = (max(getattr(block.spec, name) for block in blocks) for name in ("latent_dim", "rope_dim"))
        return sum(taken(positions * width, 2) for width in widths)


def latent_parts(spec: LatentAttentionSpec, tokens: int) -> int:
    """Maximum number of rows of the results of all KV splits in a decode step of at most `tokens`."""
    counts = [latent_rows(spec.heads, count) for count in range(1, tokens + 1)]
    return max(rows * latent_splits(rows, MAX_SPLITS) for rows in counts)


def check_device_sizes(spec: LatentAttentionSpec, name: str) -> None:
    """Raise `UnsupportedOnDeviceError` if rows of the projections don't fill whole programs, or a latent
    vector exceeds a tile.
    """
    if spec.latent_dim > MAX_DEVICE_LATENT:
        raise UnsupportedOnDeviceError(
            f"{name}: latent vectors of {spec.latent_dim}, the GPU kernels take at most {MAX_DEVICE_LATENT}"
        )
    rows = spec.heads * spec.query_dim, spec.cached_dim, spec.query_rank
    if any(count % ROW_MULTIPLE for count in rows):
        raise UnsupportedOnDeviceError(
            f"{name}: {spec.cached_dim} rows (q: {rows[0]}, rank {spec.query_rank}), the GPU kernels need "
            f"a multiple of {ROW_MULTIPLE}"
        )
