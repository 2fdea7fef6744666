"""Grouped-query attention: specification, weights, KV cache and sizes of one block."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from edgeinfer_kernels.blocks.common.alibi import alibi_slopes
from edgeinfer_kernels.blocks.common.attention_state import AttentionState
from edgeinfer_kernels.blocks.common.attention_weights import (
    AttentionWeights,
    check_device_rows,
    read_attention,
)
from edgeinfer_kernels.blocks.common.block import NormSpec, TensorReader
from edgeinfer_kernels.blocks.common.block_sizes import BlockSizes, ChunkRows, NormLengths, StepShape
from edgeinfer_kernels.blocks.common.own_norms import own_input_buffers
from edgeinfer_kernels.blocks.common.projections import stacked_lengths
from edgeinfer_kernels.blocks.common.rope import RopeSpec
from edgeinfer_kernels.blocks.common.temperature import NO_TEMPERATURE, Temperature
from edgeinfer_kernels.caches.cache_types import CacheType, element_types
from edgeinfer_kernels.caches.layer_cache import LayerCache, padded
from edgeinfer_kernels.caches.ring_cache import RingCache
from edgeinfer_kernels.cpu.runtime.abi import (
    attention_pieces,
    attention_scratch,
    attention_states,
    quantized_bytes,
)
from edgeinfer_kernels.matrix import MatrixSize, vector_lengths
from edgeinfer_kernels.sizes.cuda_matrices import (
    activation_bytes,
    attention_parts,
    cache_bytes,
    cache_positions,
    has_floats,
    head_dimensions,
    matrix_bytes,
    padded_rows,
    recent_device_bytes,
    result_widths,
    row_runs,
    taken,
    vector_bytes,
)

__all__ = ["AttentionSizes", "AttentionSpec", "AttentionState", "AttentionWeights"]


@dataclass(frozen=True)
class AttentionSpec:
    """Attention of one layer. `norm`: of queries and keys. `window`: a token attends to itself and the
    window - 1 tokens before it; 0: no limit. `chunked`: it attends to itself and the tokens before it in its
    chunk, and a chunk has `window` positions. soft_cap 0: none. `sinks`: the softmax of every head has one
    more score, a learned weight, without a value. `gated`: the result of every head is multiplied by
    sigmoid(gate); a head's rows of `attn_q` are those of its query, then those of its gate, which a file may
    have as `attn_gate` instead. `head_gated`: the result of every head is multiplied by the function of one
    gate, a row of `attn_gate`. `gate_function`: of either kind of gates. `value_length`: elements of a head's
    value, at most head_dim; 0: head_dim. `optional_sinks`: a file may have no sinks.
    `temperature`: of the queries. `qk_norm_weights` False: the q/k norm has no
    weights. `norm_after_rope`: the q/k norm of heads follows RoPE. RoPE doesn't change the length of a head.
    Queries and keys are normalized before it, without weights, and queries are multiplied by both weights
    after it: cached keys can still be moved to other positions. `ring`: number of positions of the cache of
    a shorter window, if the context is longer (`RingCache`); 0: all positions are cached.
    `value_norm`: the values of heads are normalized, without weights. `values_from_keys`: in a file without
    `attn_v`, the values are the projected keys, before their norm. `source_layer`: the block has only
    queries, and reads the cache of that layer. `alibi`: the maximum bias of ALiBi, slope · distance is
    subtracted from a score; 0: none. `clamp`: queries, keys and values are within ± clamp; 0: no limit.
    `sub_norm`: the results of all heads are normalized together. `pair_input`: the projections read the pairs
    of a draft head's input block, which are twice as long as x. `whole_step`: a token also attends to those
    after it in its step, which is a block of drafts.
    """

    kind: ClassVar[str] = "attention"
    is_divisible: ClassVar[bool] = False

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    norm: NormSpec
    rope: RopeSpec | None
    qk_norm: Literal["none", "head", "row"] = "none"
    window: int = 0
    soft_cap: float = 0.0
    sinks: bool = False
    gated: bool = False
    optional_sinks: bool = False
    value_length: int = 0
    head_gated: bool = False
    gate_function: Literal["sigmoid", "softplus"] = "sigmoid"
    temperature: Temperature = NO_TEMPERATURE
    qk_norm_weights: bool = True
    chunked: bool = False
    norm_after_rope: bool = False
    ring: int = 0
    value_norm: bool = False
    values_from_keys: bool = False
    source_layer: int | None = None
    alibi: float = 0.0
    clamp: float = 0.0
    sub_norm: bool = False
    pair_input: bool = False
    whole_step: bool = False

    @property
    def head_shape(self) -> tuple[int, ...]:
        return self.heads, self.kv_heads, self.head_dim

    @property
    def recurrent(self) -> None:
        return None

    @property
    def value_dim(self) -> int:
        """Elements of a head's value; rows of values in main memory have `head_dim`."""
        return self.value_length or self.head_dim

    @property
    def result_columns(self) -> int:
        """Elements of a row of all heads' results, which `attn_output` reads."""
        return self.heads * self.value_dim

    @property
    def q_head(self) -> int:
        """Rows of `attn_q` for each head."""
        return self.head_dim * (2 if self.gated else 1)

    @property
    def q_rows(self) -> int:
        """Rows of the queries of all heads."""
        return self.heads * self.head_dim

    @property
    def kv_rows(self) -> int:
        """Rows of the keys of all heads, and of the values if these are as long."""
        return self.kv_heads * self.head_dim

    @property
    def projected_rows(self) -> tuple[int, int, int]:
        """Rows of `attn_q`, `attn_k` and `attn_v`."""
        return self.heads * self.q_head, self.kv_rows, self.kv_heads * self.value_dim

    def read(self, tensors: TensorReader) -> "AttentionWeights":
        return read_attention(self, tensors)

    def sizes(self, weights: "AttentionWeights", norms: NormLengths) -> "AttentionSizes":
        w = weights
        biases = (w.attn_q_bias, w.attn_k_bias, w.attn_v_bias)
        stacked = stacked_lengths(biases, (w.attn_q, w.attn_k, w.attn_v))
        norm_weights = w.attn_q_norm, w.attn_k_norm, w.query_weights
        sub_norm = None if w.sub_norm is None else w.sub_norm.weight
        slopes = alibi_slopes(self.heads, self.alibi) if self.alibi else None
        others = vector_lengths(w.attn_output_bias, *norm_weights, w.attn_sinks, sub_norm, slopes)
        q, k, v, output = map(MatrixSize.of, (w.attn_q, w.attn_k, w.attn_v, w.attn_output))
        gate = None if w.attn_gate is None else MatrixSize.of(w.attn_gate)
        vectors = (*stacked, *norms.vectors, *others)
        return AttentionSizes(self, q, k, v, output, vectors, gate, norms.is_own)

    def has_ring(self, context: int) -> bool:
        """Whether the cache for this context is a ring."""
        return 0 < self.ring < context and not self.temperature

    def cached_positions(self, context: int) -> int:
        """Positions that the cache for this context holds."""
        return self.ring if self.has_ring(context) else context

    def read_positions(self, depth: float) -> float:
        """Number of cached positions that a token at this depth reads."""
        return min(depth, self.window or depth)

    def device_positions(self, context: int) -> int:
        """Positions of the cache for this context on a GPU."""
        return self.ring if self.has_ring(context) else cache_positions(context)

    def device_rows(self, context: int) -> int:
        """Keys of the cache for this context on a GPU, and as many values."""
        return self.kv_heads * self.device_positions(context)

    def state_nbytes(self, context: int, cache_type: CacheType) -> int:
        """Bytes of the KV cache in main memory."""
        if self.source_layer is not None:
            return 0
        return LayerCache.nbytes_for(self, self.cached_positions(context), cache_type)

    def allocate_state(self, context: int, cache_type: CacheType) -> "AttentionState | None":
        if self.source_layer is not None:
            return None
        kind = RingCache if self.has_ring(context) else LayerCache
        return AttentionState(self, kind.allocate(self, self.cached_positions(context), cache_type))


@dataclass(frozen=True)
class AttentionSizes(BlockSizes):
    """The sizes of an attention block. `vectors`: lengths of norms and biases; `own_norm`: `has_own_norm`."""

    label: ClassVar[str] = "attention"
    state_label: ClassVar[str] = "keys and values"

    spec: AttentionSpec
    q: MatrixSize
    k: MatrixSize
    v: MatrixSize
    output: MatrixSize
    vectors: tuple[int, ...] = ()
    gate: MatrixSize | None = None
    own_norm: bool = False

    @property
    def has_own_norm(self) -> bool:  # type: ignore[override]
        return self.own_norm

    @property
    def reads_other_layers(self) -> bool:  # type: ignore[override]
        return self.spec.source_layer is not None

    def undivided(self) -> list[MatrixSize]:
        return [*self.inputs(), self.output]

    def undivided_device_bytes(self) -> int:
        """Without the RoPE table, which layers share."""
        check_device_rows(self.spec, self.q, self.k, self.v)
        stack = sum(map(matrix_bytes, self.stacked_inputs()))
        return stack + matrix_bytes(self.output) + vector_bytes(self.vectors)

    @property
    def qkv_rows(self) -> int:
        """Rows of q, k and v on a GPU, with padding."""
        return sum(padded_rows(run.rows) for run in self.stacked_inputs())

    def state_name(self, context: int) -> str:
        """As `BlockSizes.state_name`, with the number of positions of a ring."""
        ring = f", {self.spec.ring} positions" if self.spec.has_ring(context) else ""
        return self.state_label + ring

    def state_bytes(self, context: int, cache_type: CacheType) -> int:
        return self.spec.state_nbytes(context, cache_type)

    def state_device_bytes(self, context: int, cache_type: CacheType) -> int:
        return 0 if self.reads_other_layers else self.read_state_device_bytes(context, cache_type)

    def with_whole_cache(self) -> "AttentionSizes":
        return replace(self, spec=replace(self.spec, ring=0))

    def has_device_pages(self, context: int) -> bool:
        return not self.spec.has_ring(context)

    def read_state_bytes(self, context: int, cache_type: CacheType) -> int:
        return LayerCache.nbytes_for(self.spec, self.spec.cached_positions(context), cache_type)

    def read_state_device_bytes(self, context: int, cache_type: CacheType) -> int:
        """Of keys and of values, with their scales."""
        rows, (of_keys, of_values) = self.spec.device_rows(context), element_types(cache_type)
        keys, values = (rows, self.spec.head_dim, of_keys), (rows, self.spec.value_dim, of_values)
        widths = self.spec.head_dim, self.spec.value_dim
        recent = recent_device_bytes(self.spec.kv_heads, widths, context, cache_type)
        return cache_bytes(*keys) + cache_bytes(*values) + recent

    def rope_table(self) -> tuple[RopeSpec | None, int] | None:
        return self.spec.rope, self.spec.head_dim

    def state_share(self, depth: int, context: int) -> float:
        return self.spec.read_positions(depth) / self.spec.cached_positions(context)

    def state_operations(self, tokens: int, start: int) -> float:
        seen = min(start + tokens / 2, self.spec.window or start + tokens)
        return 2 * tokens * seen * self.spec.heads * (self.spec.head_dim + self.spec.value_dim)

    def cpu_buffers(self, hidden_size: int) -> dict[str, int]:
        heads, columns = self.spec.heads, self.spec.q_rows
        return {
            "attn_out": 4 * padded(columns),
            "attn_out.quantized": quantized_bytes(padded(columns)),
            "queries": 4 * heads * padded(self.spec.head_dim),
            "projected_q": 4 * padded(self.q.rows),
            "projected_k": 4 * padded(self.k.rows),
            "projected_v": 4 * padded(max(self.k.rows, self.v.rows)),
            **({"head_gates": 4 * padded(self.gate.rows)} if self.gate else {}),
            **(own_input_buffers(hidden_size) if self.own_norm else {}),
        }

    def cpu_scratch(self) -> int:
        return attention_scratch(self.spec.heads // self.spec.kv_heads, padded(self.spec.head_dim))

    def cpu_states(self, threads: int) -> int:
        """The running sums of attention over KV splits."""
        spec = self.spec
        one = attention_states(spec.heads // spec.kv_heads, padded(spec.head_dim))
        return one * attention_pieces(threads, spec.kv_heads)

    def inputs(self) -> list[MatrixSize]:
        if self.reads_other_layers:
            return [self.q]
        return [self.q, self.k, self.v, *([self.gate] if self.gate else [])]

    def stacked_inputs(self) -> list[MatrixSize]:
        return row_runs(self.inputs())

    def outputs(self) -> list[MatrixSize]:
        return [self.output]

    @classmethod
    def step_bytes(cls, blocks: Sequence["AttentionSizes"], step: StepShape) -> int:
        widths = result_widths(block.spec for block in blocks)
        tiles = [block._tile(step.tokens) for block in blocks]
        floats = [
            step.tokens * max(block.qkv_rows for block in blocks),
            step.tokens * widths[-1],
            max(rows * dimensions for rows, dimensions in tiles),
            2 * max(rows for rows, _ in tiles),
            step.tokens * max(block.spec.kv_heads for block in blocks),
        ]
        is_float = has_floats(block.output for block in blocks)
        attn_out = sum(activation_bytes(step.tokens, width, is_float) for width in widths)
        return attn_out + sum(taken(count, 4) for count in floats)

    def _tile(self, tokens: int) -> tuple[int, int]:
        """Rows of the partial results of all KV splits, and their padded length."""
        spec = self.spec
        rows = attention_parts(spec.heads, spec.kv_heads, tokens)
        return rows, head_dimensions(spec.value_dim)

    @classmethod
    def prompt_bytes(cls, blocks: Sequence["AttentionSizes"], chunk: int, hidden_size: int) -> int:
        """The queries, and the results of the heads, in float16."""
        queries = max(block.spec.q_rows for block in blocks)
        results = result_widths(block.spec for block in blocks)[-1]
        return taken(chunk * queries, 2) + taken(chunk * results, 2)

    def chunk_rows(self, chunk: int, hidden_size: int) -> ChunkRows:
        return ChunkRows(products=chunk * sum(matrix.rows for matrix in self.inputs()))

    def streamed_vector_bytes(self) -> int:
        return vector_bytes(self.vectors) + 2 * taken(self.spec.head_dim, 8)

    @classmethod
    def streamed_state_bytes(cls, blocks: Sequence["AttentionSizes"], context: int) -> int:
        """The KV cache of the largest block, in float16."""
        keys, values = (
            max(getattr(block.spec, width) * block.spec.device_rows(context) for block in blocks)
            for width in ("head_dim", "value_dim")
        )
        return taken(keys, 2) + taken(values, 2)
