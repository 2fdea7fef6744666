"""Attention on a GPU: weights, buffers of a decode step, and the launches of decode and prefill."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from edgeinfer_kernels.blocks.attention import AttentionSpec, AttentionWeights
from edgeinfer_kernels.blocks.common.alibi import alibi_slopes
from edgeinfer_kernels.blocks.common.attention_weights import check_device_rows
from edgeinfer_kernels.blocks.common.block_sizes import StepShape
from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.cuda.blocks.common.attention_splits import (
    NO_GATE,
    SIGMOID_GATE,
    SOFTPLUS_GATE,
    combine_splits_kernel,
)
from edgeinfer_kernels.cuda.blocks.embedding.eagle_input import chunk_pairs, step_pairs
from edgeinfer_kernels.cuda.cache.host_caches import HostCaches
from edgeinfer_kernels.cuda.cache.layout import BATCH, tokens_of_sequence
from edgeinfer_kernels.cuda.cache.shift_kernels import ShiftedHeads, shift_context
from edgeinfer_kernels.cuda.decode.decode_attention import decode_attention_kernel
from edgeinfer_kernels.cuda.decode.step_norms import NextNorm
from edgeinfer_kernels.cuda.decode.workspace import Activations, has_floats, take_activations
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.prefill.flash_attention import AttentionTile, attention_tile, flash_attention
from edgeinfer_kernels.cuda.prefill.prefill_rope import ProjectedHeads, rope_append
from edgeinfer_kernels.cuda.prefill.prefill_rows import ScaledRows, norm_rows
from edgeinfer_kernels.cuda.triton_ops.activations import apply_gates_kernel
from edgeinfer_kernels.cuda.triton_ops.cache_tiles import CACHES
from edgeinfer_kernels.cuda.triton_ops.kernel_args import (
    AttentionConfig,
    CacheArgs,
    RopeArgs,
    SplitArgs,
    SplitConfig,
)
from edgeinfer_kernels.cuda.tuning.step_shapes import Tuning, next_power_of_two
from edgeinfer_kernels.cuda.weights.device_block import DeviceBlock, DeviceCache
from edgeinfer_kernels.cuda.weights.device_builder import DeviceBuilder, Stack, reordered
from edgeinfer_kernels.cuda.weights.packing import DeviceMatrix
from edgeinfer_kernels.cuda.weights.rope_tables import head_order
from edgeinfer_kernels.sizes.cuda_buffers import MAX_TOKENS
from edgeinfer_kernels.sizes.cuda_matrices import (
    QUERY_TOKENS,
    SPARE_POSITIONS,
    attention_parts,
    attention_rows,
    head_dimensions,
    result_widths,
)
from edgeinfer_kernels.stages import Shard

if TYPE_CHECKING:
    from edgeinfer_kernels.cuda.decode.decode_step import DecodeStep
    from edgeinfer_kernels.cuda.decode.step_norms import Source
    from edgeinfer_kernels.cuda.prefill.prefill import Chunk, Prefill
    from edgeinfer_kernels.cuda.prefill.prompt_blocks import PromptBlock

MAX_QUERY_ELEMENTS = 1 << 14
"""Elements of the queries of a program of a decode step in 64 KiB of shared memory."""
MAX_WARPS = 16
"""Maximum warps of an attention program; with more, its threads would have too few registers."""
LONG_HEAD, FEW_PROGRAMS = 256, 64
"""Elements of a head, and programs of a query tile, from which on or up to which a program of a step of
several tokens has twice the warps.
"""
APART_TOKENS, MAX_REREAD = 4, 1 << 24
"""Tokens of a step, and elements of the keys in a layer's cache times these tokens, up to which each token
has programs: these finish earlier than those of several tokens, and add up the KV splits themselves, but each
reads the positions again, from the L2 cache.
"""
QK_NORMS = {"none": 0, "head": 1, "row": 2}
HAS_PAGES = True
"""Steps and prompts can read and write a cache with pages."""
PART = "attention"
"""The name of the weights in lists of device memory."""
HostStates = HostCaches
"""The KV caches of blocks on the CPU, one block at a time."""


@dataclass(frozen=True)
class DeviceAttention:
    """The weights of an attention block on the device; vectors are None if they are not needed."""

    qkv: Stack
    output: DeviceMatrix
    qkv_bias: Tensor | None
    output_bias: Tensor | None
    q_norm: Tensor | None
    k_norm: Tensor | None
    query_weights: Tensor | None
    sinks: Tensor | None
    slopes: Tensor | None
    table: Tensor
    sub_norm: NextNorm | None = None
    """The norm of the results of all heads."""

    @property
    def inputs(self) -> Sequence[DeviceMatrix]:
        return self.qkv.parts

    @property
    def outputs(self) -> Sequence[DeviceMatrix]:
        return [self.output]


def take(
    builder: DeviceBuilder, spec: AttentionSpec, w: AttentionWeights, shards: Sequence[Shard] = ()
) -> DeviceAttention:
    """Allocate the weights. Raises `UnsupportedOnDeviceError`."""
    check_device_rows(spec, w.attn_q, w.attn_k, w.attn_v)
    order = head_order(spec.rope, spec.head_dim)
    q_order = np.concatenate([order, np.arange(spec.head_dim, spec.q_head)])
    biases = (w.attn_q_bias, w.attn_k_bias, w.attn_v_bias)
    orders = q_order, order, None, None
    projections = list(zip(w.inputs(), orders, strict=False))
    return DeviceAttention(
        qkv=builder.stack(projections),
        output=builder.matrix(w.attn_output),
        qkv_bias=builder.stacked_bias(biases, (w.attn_q, w.attn_k, w.attn_v), orders[:3]),
        output_bias=builder.vector(w.attn_output_bias),
        q_norm=builder.vector(reordered(w.attn_q_norm, order)),
        k_norm=builder.vector(reordered(w.attn_k_norm, order)),
        query_weights=builder.vector(reordered(w.query_weights, order)),
        sinks=builder.vector(w.attn_sinks),
        slopes=builder.vector(alibi_slopes(spec.heads, spec.alibi)) if spec.alibi else None,
        table=builder.rope_table(spec.rope, spec.head_dim),
        sub_norm=NextNorm.take_sub_norm(builder, spec.norm, w.sub_norm),
    )


def take_state(
    arena: Arena, spec: AttentionSpec, positions: int, kind: CacheType, slots: Tensor | None = None
) -> DeviceCache | None:
    """Allocate the KV cache, unless it is that of another layer; `slots`: of recent positions."""
    if spec.source_layer is not None:
        return None
    context, widths = positions - SPARE_POSITIONS, (spec.head_dim, spec.value_dim)
    is_ring, positions = spec.has_ring(context), spec.device_positions(context)
    return DeviceCache.take(arena, spec.kv_heads, widths, positions, kind, is_ring, slots)


def oldest_capability(spec: AttentionSpec) -> int:
    """Ten times the compute capability that the heads need: tiles of longer ones, or a step's queries of one
    key head, exceed 64 KiB of shared memory.
    """
    queries = attention_rows(spec.heads, spec.kv_heads, MAX_TOKENS) * head_dimensions(spec.head_dim)
    return 80 if spec.head_dim > 256 or queries > MAX_QUERY_ELEMENTS else 0


def shift(block: DeviceBlock, keep: int, dropped: int, end: int) -> None:
    """Evict `dropped` positions after the first `keep`; the later ones up to `end` move up."""
    spec: AttentionSpec = block.residual.block
    heads = ShiftedHeads(spec.head_dim, spec.value_dim, spec.rope is not None)
    shift_context(block.state, block.weights.table, heads, keep, dropped, end)


def inactive_bytes(w: DeviceAttention) -> int:
    """Bytes of weights that not every token reads."""
    return 0


class Space:
    """The buffers of a decode step, shared by all attention blocks."""

    def __init__(self, blocks: Sequence[DeviceBlock], arena: Arena, step: StepShape) -> None:
        specs: list[AttentionSpec] = [block.residual.block for block in blocks]
        weights: list[DeviceAttention] = [block.weights for block in blocks]
        tokens, floats = step.tokens, has_floats(*(w.output for w in weights))
        widths = result_widths(specs)
        self._attn_out = {width: take_activations(arena, tokens, width, floats) for width in widths}
        self.qkv = arena.take((tokens, max(w.qkv.rows for w in weights)), torch.float32)
        self.flat = arena.take((tokens, widths[-1]), torch.float32)
        tiles = [
            (
                attention_parts(spec.heads, spec.kv_heads, tokens),
                head_dimensions(spec.value_dim),
            )
            for spec in specs
        ]
        self.parts = arena.take((max(rows * dimensions for rows, dimensions in tiles),), torch.float32)
        self.peaks = arena.take((max(rows for rows, _ in tiles), 2), torch.float32)
        self.arrived = arena.take((tokens, max(spec.kv_heads for spec in specs)), torch.int32)

    def attn_out(self, spec: AttentionSpec) -> Activations:
        """The results of a block's heads. Rows of another length have another buffer, because the padding of
        rows must stay zero.
        """
        return self._attn_out[spec.result_columns]


def decode(
    step: "DecodeStep", number: int, block: DeviceBlock, source: "Source", tokens: int, stage: int
) -> "Source":
    """The projections q, k and v; then attention and the output projection."""
    w, space, spec = block.weights, step.space("attention"), block.residual.block
    source = step_pairs(step) if spec.pair_input else source
    step.launches.stacked(w.qkv, source, space.qkv, w.qkv_bias, tokens)
    _attend(step, spec, w, block.state, tokens)
    return step.close_block(number, w.output, w.output_bias, space.attn_out(spec), "output", tokens)


def _attend(
    step: "DecodeStep", spec: AttentionSpec, w: DeviceAttention, cache: DeviceCache, tokens: int
) -> None:
    """Write the result of the heads as activations, and keys and values to the cache."""
    launches, space = step.launches, step.space("attention")
    out, state, stride = space.attn_out(spec), launches.workspace.state, space.qkv.shape[1]
    pages, is_batch, sinks = step.pages, step.layout == BATCH, launches.or_nothing(w.sinks)
    positions, several = launches.model.positions, tokens_of_sequence(cache.is_four_bit)
    split = split_config(launches.tuning, spec, positions, tokens, is_batch=is_batch, of_sequence=several)
    direct = spec.value_dim % 16 == 0 and w.sub_norm is None
    results = SplitArgs(space.parts, space.peaks, space.arrived), out.words, space.flat, sinks
    has = {"has_sinks": w.sinks is not None, "has_query_weights": w.query_weights is not None}
    config = attention_config(spec, cache, **has, is_paged=pages is not None)
    constants: dict[str, Any] = {"ATTENTION": config, "SPLIT": split, "OUT": out.config, "DIRECT": direct}
    launches.launch(
        decode_attention_kernel,
        (spec.kv_heads, split.splits, -(-tokens // split.query_tokens)),
        *(space.qkv, stride, cache_args(cache, pages), state, rope_args(step, spec, w)),
        *(spec.scale, spec.soft_cap, *results),
        **constants,
        warps=attention_warps(launches.tuning, spec, split),
    )
    if not split.combines:
        grid, arguments = (spec.kv_heads, spec.heads // spec.kv_heads, tokens), (*results, space.qkv, stride)
        launches.launch(combine_splits_kernel, grid, state, *arguments, **constants, warps=1)
    columns = spec.result_columns
    if w.sub_norm is not None:
        rows = space.flat.view(-1)[: tokens * columns].view(tokens, columns)
        launches.norms.normalize(rows, columns, w.sub_norm, out, tokens)
    elif not direct:
        launches.norms.quantize(space.flat, columns, out, tokens)


def attention_warps(tuning: Tuning, spec: AttentionSpec, split: SplitConfig) -> int:
    """The warps of a program of a step's attention. Of several tokens with long heads there are more, because
    a warp would have thousands of instructions: with many queries only if there are few programs, since fewer
    of them would fit into a multiprocessor.
    """
    warps = tuning.attention_warps * max(1, split.queries // 16)
    is_long = head_dimensions(max(spec.head_dim, spec.value_dim)) >= LONG_HEAD
    is_small = split.queries == 16 or spec.kv_heads * split.splits <= FEW_PROGRAMS
    more = 2 if split.query_tokens > 1 and is_long and is_small else 1
    return min(warps * more, MAX_WARPS)


def cache_args(cache: DeviceCache, pages: Tensor | None) -> CacheArgs:
    """What kernels of a step read and write of a cache."""
    return CacheArgs(
        cache.keys,
        cache.key_scales,
        cache.values,
        cache.value_scales,
        cache.positions,
        pages,
        0 if pages is None else pages.stride(0),
        cache.recent_args,
    )


def rope_args(step: "DecodeStep", spec: AttentionSpec, w: DeviceAttention) -> RopeArgs:
    """What kernels of a step read for the norm and RoPE of queries and keys."""
    or_nothing = step.launches.or_nothing
    return RopeArgs(
        w.table,
        or_nothing(w.q_norm),
        or_nothing(w.k_norm),
        or_nothing(w.query_weights),
        spec.norm.epsilon,
        or_nothing(w.slopes),
    )


def gate_at(spec: AttentionSpec) -> int:
    """Where the gates of whole heads begin in a row of the projection; 0: there are none."""
    columns = spec.heads * spec.head_dim + spec.kv_heads * (spec.head_dim + spec.value_dim)
    return columns if spec.head_gated else 0


def split_config(
    tuning: Tuning,
    spec: AttentionSpec,
    positions: int,
    tokens: int,
    *,
    is_batch: bool = False,
    of_sequence: int = MAX_TOKENS,
) -> SplitConfig:
    """The KV splits of a step; of a batch fewer, because the programs of its sequences run at the same time.
    `of_sequence`: maximum number of tokens of a sequence in a batch.
    """
    tile = max(16, min(tuning.positions, 4096 // head_dimensions(spec.head_dim)))
    splits, group = tuning.splits_for(positions), spec.heads // spec.kv_heads
    if is_batch:
        splits = max(1, splits * min(16, next_power_of_two(max(2, group))) // 16)
    read = min(positions - SPARE_POSITIONS, spec.window or positions)
    elements = tokens * read * spec.kv_heads * spec.head_dim
    is_apart = tokens <= APART_TOKENS and elements <= MAX_REREAD
    own = 1 if is_batch or is_apart else min(tokens, QUERY_TOKENS)
    rows, most = attention_rows(spec.heads, spec.kv_heads, own), of_sequence if is_batch else tokens
    return SplitConfig(most, rows, splits, tile, is_batch, own, combines=own == 1)


def attention_config(
    spec: AttentionSpec,
    cache: DeviceCache,
    *,
    has_sinks: bool,
    has_query_weights: bool = False,
    is_paged: bool = False,
) -> AttentionConfig:
    """The heads for kernels of a step."""
    k_at, gate = spec.heads * spec.q_head, NO_GATE
    if spec.gated or spec.head_gated:
        gate = SOFTPLUS_GATE if spec.gate_function == "softplus" else SIGMOID_GATE
    return AttentionConfig(
        spec.kv_heads, spec.heads // spec.kv_heads, spec.head_dim, spec.q_head,
        head_dimensions(spec.head_dim), spec.value_dim, head_dimensions(spec.value_dim),
        k_at, k_at + spec.kv_heads * spec.head_dim,
        int(QK_NORMS[spec.qk_norm]), int(CACHES[cache.keys.dtype]), int(CACHES[cache.values.dtype]),
        spec.window, is_capped=spec.soft_cap != 0, has_sinks=has_sinks,
        temperature=spec.temperature.scale, temperature_length=spec.temperature.length,
        has_query_weights=has_query_weights, is_ring=cache.is_ring,
        has_value_norm=spec.value_norm, queries_only=spec.source_layer is not None,
        temperature_offset=spec.temperature.offset, is_chunked=spec.chunked,
        has_alibi=spec.alibi != 0, clamp=spec.clamp, is_paged=is_paged,
        has_recent=cache.recent is not None, gate=int(gate), gate_at=gate_at(spec),
    )  # fmt: skip


class PromptSpace:
    """The buffers of a chunk of a prompt, for all blocks: queries, and results of the heads."""

    def __init__(self, specs: Sequence[AttentionSpec], arena: Arena, chunk: int) -> None:
        columns = max(spec.heads * spec.head_dim for spec in specs)
        self.queries = arena.take((chunk * columns,), torch.float16)
        self.attn_out = arena.take((chunk * result_widths(specs)[-1],), torch.float16)


def prefill(prompt: "Prefill", chunk: "Chunk", number: int, block: "PromptBlock") -> None:
    """x += attention of a chunk of tokens; its keys and values are written to the cache."""
    spec, w, start = block.residual.block, block.weights, chunk.start
    h = chunk.own if block.residual.has_own_norm else chunk.h
    h = chunk_pairs(prompt, chunk) if spec.pair_input else h
    space, tokens = prompt.space("attention"), len(chunk.x)
    cache = block.state or prompt.host_states("attention").fetch(block.index, start)
    qkv, queries = append_chunk(prompt, chunk, spec, w, cache, h)
    args = cache.args._replace(pages=chunk.pages)
    attn_out = space.attn_out[: tokens * spec.result_columns].view(tokens, spec.result_columns)
    tile = _tile(prompt, spec, cache)
    flash_attention(queries, args, chunk.words, spec, attn_out, tile, w.sinks, cache.is_ring, w.slopes)
    if spec.gated or spec.head_gated:
        apply_gates_kernel[(tokens, spec.heads)](
            attn_out, qkv, h.scales, qkv.stride(0), HEAD_DIM=spec.value_dim,
            DIMENSIONS=head_dimensions(spec.value_dim), GATE_AT=gate_at(spec),
            SOFTPLUS=spec.gate_function == "softplus", num_warps=1,
        )  # fmt: skip
    if block.state is None:
        prompt.host_states("attention").put_back(block.index, cache, start, tokens)
    scales = None
    if w.sub_norm is not None:
        h = ScaledRows(space.queries[: attn_out.numel()].view(attn_out.shape), prompt.products.scales(tokens))
        norm_rows(attn_out, w.sub_norm.spec, w.sub_norm.weight, None, h.rows, h.scales)
        attn_out, scales = h.rows, h.scales
    y = prompt.result(attn_out, scales, w.output, w.output_bias)
    prompt.add(chunk, number, y, w.output_bias, scales)


def append_chunk(
    prompt: "Prefill",
    chunk: "Chunk",
    spec: AttentionSpec,
    w: DeviceAttention,
    cache: DeviceCache,
    h: ScaledRows,
) -> tuple[Tensor, Tensor]:
    """The projections of a chunk, and its queries; keys and values are written to the cache."""
    columns = spec.heads * spec.head_dim
    qkv = prompt.products.stacked(h.rows, w.qkv)
    queries = prompt.space("attention").queries[: len(chunk.x) * columns]
    queries = queries.view(-1, spec.heads, spec.head_dim)
    heads = ProjectedHeads(qkv, h.scales, w.qkv_bias, w.q_norm, w.k_norm, w.query_weights)
    args = cache.args._replace(pages=chunk.pages)
    rope_append(heads, w.table, spec, chunk.words, queries, args, cache.is_ring)
    return qkv, queries


def _tile(prompt: "Prefill", spec: AttentionSpec, cache: DeviceCache) -> AttentionTile:
    quantized = {cache.keys.dtype, cache.values.dtype} != {torch.float16}
    return attention_tile(spec.head_dim, spec.heads // spec.kv_heads, prompt.capability, quantized)
