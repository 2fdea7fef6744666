"""Latent attention on a GPU: weights, buffers of a decode step, and the launches of decode and prefill."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edgeinfer_kernels.blocks.common.block_sizes import StepShape
from edgeinfer_kernels.blocks.latent_attention import (
    LatentAttentionSpec,
    LatentAttentionWeights,
    check_device_sizes,
    latent_parts,
)
from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.caches.latent_cache import latent_type
from edgeinfer_kernels.cuda.cache.host_latents import HostLatents
from edgeinfer_kernels.cuda.cache.layout import BATCH
from edgeinfer_kernels.cuda.cache.shift_kernels import ShiftedHeads, shift_context
from edgeinfer_kernels.cuda.decode.latent_kernels import (
    latent_combine_kernel,
    latent_queries_kernel,
    latent_rows_kernel,
    latent_step_kernel,
)
from edgeinfer_kernels.cuda.decode.step_norms import NextNorm, Source
from edgeinfer_kernels.cuda.decode.workspace import has_floats, take_activations
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.prefill.flash_attention import AttentionTile, transform_heads
from edgeinfer_kernels.cuda.prefill.latent_chunks import latent_chunk_kernel
from edgeinfer_kernels.cuda.prefill.prefill_rows import norm_rows
from edgeinfer_kernels.cuda.triton_ops.cache_tiles import CACHES
from edgeinfer_kernels.cuda.triton_ops.kernel_args import CacheArgs, LatentConfig, SplitArgs, SplitConfig
from edgeinfer_kernels.cuda.tuning.step_shapes import (
    LATENT_TILE,
    Tuning,
    latent_rows,
    latent_splits,
)
from edgeinfer_kernels.cuda.weights.device_block import DeviceBlock, DeviceCache
from edgeinfer_kernels.cuda.weights.device_builder import DeviceBuilder, Stack
from edgeinfer_kernels.cuda.weights.packing import DeviceMatrix
from edgeinfer_kernels.cuda.weights.rope_tables import head_order
from edgeinfer_kernels.sizes.cuda_buffers import MAX_TOKENS
from edgeinfer_kernels.sizes.cuda_matrices import head_dimensions
from edgeinfer_kernels.stages import Shard

if TYPE_CHECKING:
    from edgeinfer_kernels.cuda.decode.decode_step import DecodeStep
    from edgeinfer_kernels.cuda.decode.workspace import Activations
    from edgeinfer_kernels.cuda.prefill.prefill import Chunk, Prefill
    from edgeinfer_kernels.cuda.prefill.prompt_blocks import PromptBlock

HAS_PAGES = True
"""Steps and prompts can read and write a cache with pages."""
PART = "latent attention"
"""The name of the weights in lists of device memory."""
HostStates = HostLatents
"""The latent caches of blocks on the CPU, one block at a time."""


@dataclass(frozen=True)
class DeviceLatentAttention:
    """The weights of a latent attention block on the device. projections: W_q or its first factor, and the
    rows of the cache; queries: the second factor; table None: there is no RoPE.
    """

    projections: Stack
    queries: Stack | None
    keys: DeviceMatrix
    values: DeviceMatrix
    output: DeviceMatrix
    query_norm: Tensor | None
    latent_norm: Tensor
    table: Tensor | None

    @property
    def inputs(self) -> Sequence[DeviceMatrix]:
        return self.projections.parts

    @property
    def outputs(self) -> Sequence[DeviceMatrix]:
        return [self.output]

    def cache_at(self, spec: LatentAttentionSpec, *, padded: bool) -> int:
        """Where the rows of the cache begin in the results of `projections`."""
        lengths = spec.query_rank or spec.heads * spec.query_dim, spec.cached_dim
        return self.projections.begins(lengths, padded=padded)[1]


def row_order(spec: LatentAttentionSpec, before: int) -> npt.NDArray[np.int64]:
    """The order of rows of which the first `before` have no RoPE."""
    return np.concatenate([np.arange(before), before + head_order(spec.rope, spec.rope_dim)])


def take(
    builder: DeviceBuilder,
    spec: LatentAttentionSpec,
    w: LatentAttentionWeights,
    shards: Sequence[Shard] = (),
) -> DeviceLatentAttention:
    """Allocate the weights. Raises `UnsupportedOnDeviceError`."""
    check_device_sizes(spec, w.attn_kv_a.name)
    queries = w.attn_q, row_order(spec, spec.nope_dim)
    rows = w.attn_kv_a, row_order(spec, spec.latent_dim)
    first = queries if w.attn_q_a is None else (w.attn_q_a, None)
    latent_norm = builder.vector(w.attn_kv_a_norm)
    assert latent_norm is not None
    return DeviceLatentAttention(
        projections=builder.stack((first, rows)),
        queries=None if w.attn_q_a is None else builder.stack((queries,)),
        keys=builder.matrix(w.attn_k_b),
        values=builder.matrix(w.attn_v_b),
        output=builder.matrix(w.attn_output),
        query_norm=builder.vector(w.attn_q_a_norm),
        latent_norm=latent_norm,
        table=builder.rope_table(spec.rope, spec.rope_dim) if spec.rope else None,
    )


def take_state(
    arena: Arena, spec: LatentAttentionSpec, positions: int, kind: CacheType, slots: Tensor | None = None
) -> DeviceCache:
    """Allocate the latent cache; `slots`: of recent positions."""
    widths = spec.latent_dim, spec.rope_dim
    return DeviceCache.take(arena, 1, widths, positions, latent_type(kind), slots=slots)


def shift(block: DeviceBlock, keep: int, dropped: int, end: int) -> None:
    """Evict `dropped` positions after the first `keep`; the later ones up to `end` move up."""
    spec: LatentAttentionSpec = block.residual.block
    cache: DeviceCache = block.state
    turned = DeviceCache(cache.values, cache.value_scales, cache.keys, cache.key_scales)
    table = cache.keys if block.weights.table is None else block.weights.table
    shift_context(
        turned, table, ShiftedHeads(spec.rope_dim, spec.latent_dim, spec.rope is not None), keep, dropped, end
    )


def oldest_capability(spec: LatentAttentionSpec) -> int:
    """Ten times the compute capability: older GPUs have too little shared memory for a tile."""
    return 80


def inactive_bytes(w: DeviceLatentAttention) -> int:
    """Bytes of weights that not every token reads."""
    return 0


class Space:
    """The buffers of a decode step, shared by all latent attention blocks."""

    def __init__(self, blocks: Sequence[DeviceBlock], arena: Arena, step: StepShape) -> None:
        specs: list[LatentAttentionSpec] = [block.residual.block for block in blocks]
        weights: list[DeviceLatentAttention] = [block.weights for block in blocks]
        tokens, heads = step.tokens, max(spec.heads for spec in specs)
        ranks = [w.queries for w in weights if w.queries is not None]
        rank = max(spec.query_rank for spec in specs)
        floats = has_floats(*(matrix for queries in ranks for matrix in queries.parts))
        self.query_latents = take_activations(arena, tokens, rank, floats) if rank else None
        nope, latent = max(spec.nope_dim for spec in specs), max(spec.latent_dim for spec in specs)
        self.nope = take_activations(arena, tokens, nope, has_floats(*(w.keys for w in weights)), heads)
        floats = has_floats(*(w.values for w in weights))
        self.head_latents = take_activations(arena, tokens, latent, floats, heads)
        columns, floats = max(s.heads * s.value_dim for s in specs), has_floats(*(w.output for w in weights))
        self.attn_out = take_activations(arena, tokens, columns, floats)
        rows = max(w.projections.rows for w in weights)
        self.projected = arena.take((tokens, rows), torch.float32)
        query_rows = max((queries.rows for queries in ranks), default=0)
        self.queries = arena.take((tokens, query_rows), torch.float32)
        self.latents = arena.take((tokens * max(s.heads * s.latent_dim for s in specs),), torch.float32)
        self.ropes = arena.take((tokens * max(s.heads * s.rope_dim for s in specs),), torch.float32)
        parts = max(latent_parts(spec, tokens) for spec in specs)
        dimensions = max(head_dimensions(spec.latent_dim) for spec in specs)
        self.parts = arena.take((parts * dimensions,), torch.float32)
        self.peaks = arena.take((parts, 2), torch.float32)


def latent_config(
    spec: LatentAttentionSpec, cache: DeviceCache, *, is_paged: bool = False, is_batch: bool = False
) -> LatentConfig:
    """The sizes, and where the sequences are in the cache."""
    return LatentConfig(
        spec.heads, spec.nope_dim, spec.rope_dim, spec.latent_dim, spec.query_dim,
        head_dimensions(spec.latent_dim), head_dimensions(spec.rope_dim), int(CACHES[cache.keys.dtype]),
        has_rope=spec.rope is not None, temperature=spec.temperature.scale,
        temperature_length=spec.temperature.length, temperature_offset=spec.temperature.offset,
        is_paged=is_paged, is_batch=is_batch,
        has_recent=cache.recent is not None,
    )  # fmt: skip


def decode(
    step: "DecodeStep", number: int, block: DeviceBlock, source: Source, tokens: int, stage: int
) -> Source:
    """The projections, the rows of the cache, the queries, attention, the values, and the last projection."""
    spec, w, space = block.residual.block, block.weights, step.space("latent_attention")
    launches, state, cache = step.launches, step.workspace.state, block.state
    pages, nothing = step.pages, step.workspace.nothing
    config = latent_config(spec, cache, is_paged=pages is not None, is_batch=step.layout == BATCH)
    table, capacity = launches.or_nothing(w.table), launches.model.positions
    tensors = cache.keys, cache.key_scales, cache.values, cache.value_scales
    page_stride = 0 if pages is None else pages.stride(0)
    args = CacheArgs(*tensors, capacity, pages, page_stride, cache.recent_args)
    launches.stacked(w.projections, source, space.projected, None, tokens)
    rows = space.projected[:, w.cache_at(spec, padded=True) :]
    launches.launch(
        latent_rows_kernel,
        (tokens,),
        *(rows, rows.stride(0), nothing, w.latent_norm, spec.norm.epsilon, table, args, state),
        LATENT=config,
        IN_STEP=True,
        warps=4,
    )
    queries = _project_queries(step, spec, w, tokens)
    nope = space.nope.of_blocks(w.keys.shapes.blocks)
    launches.launch(
        latent_queries_kernel,
        (tokens, spec.heads),
        *(queries, queries.stride(0), nothing, table, nope.words, space.ropes, state),
        LATENT=config,
        OUT=nope.config,
        IN_STEP=True,
        warps=1,
    )
    latents = space.latents[: tokens * spec.heads * spec.latent_dim].view(tokens, -1)
    launches.head_rows(w.keys, spec.heads, nope, latents, tokens)
    sums = space.head_latents.of_blocks(w.values.shapes.blocks)
    _attend(step, spec, config, args, sums, tokens)
    attn_out = space.attn_out.of_blocks(w.output.shapes.blocks)
    launches.head_rows(w.values, spec.heads, sums, attn_out, tokens)
    return step.close_block(number, w.output, None, attn_out, "output", tokens)


def _project_queries(
    step: "DecodeStep", spec: LatentAttentionSpec, w: DeviceLatentAttention, tokens: int
) -> Tensor:
    """Rows that begin with the queries of all heads."""
    space, launches = step.space("latent_attention"), step.launches
    if w.queries is None:
        projected: Tensor = space.projected
        return projected
    out = space.query_latents.of_blocks(w.queries.parts[0].shapes.blocks)
    norm = NextNorm(spec.norm, w.query_norm, None)
    launches.norms.normalize(space.projected, spec.query_rank, norm, out, tokens)
    sums = step.workspace.sum_squares[0]
    launches.stacked(w.queries, Source(out, sums), space.queries, None, tokens)
    queries: Tensor = space.queries
    return queries


def _attend(
    step: "DecodeStep",
    spec: LatentAttentionSpec,
    config: LatentConfig,
    cache: CacheArgs,
    out: "Activations",
    tokens: int,
) -> None:
    """Attention of a step's queries; each head's sum of latent vectors is written as activations."""
    launches, space, state = step.launches, step.space("latent_attention"), step.workspace.state
    positions, is_batch = launches.model.positions, config.is_batch
    split = split_config(launches.tuning, spec, positions, tokens, is_batch=is_batch)
    results = SplitArgs(space.parts, space.peaks, step.workspace.nothing)
    launches.launch(
        latent_step_kernel,
        (latent_rows(spec.heads, split.tokens) // LATENT_TILE, split.splits, tokens if is_batch else 1),
        *(space.latents, space.ropes, cache, state, spec.scale, results),
        LATENT=config,
        SPLIT=split,
        warps=8,
    )
    launches.launch(
        latent_combine_kernel,
        (tokens * spec.heads,),
        *(results, state, out.words),
        LATENT=config,
        SPLIT=split,
        OUT=out.config,
        warps=4,
    )


def split_config(
    tuning: Tuning, spec: LatentAttentionSpec, positions: int, tokens: int, *, is_batch: bool = False
) -> SplitConfig:
    """The tile of a decode step: query rows, KV splits and positions. The sequences of a batch share the
    buffers of a step of MAX_TOKENS tokens.
    """
    splits, own = tuning.splits_for(positions), 1 if is_batch else tokens
    rows = latent_rows(spec.heads, own)
    if is_batch:
        splits = max(1, min(splits, latent_parts(spec, MAX_TOKENS) // (MAX_TOKENS * rows)))
    else:
        splits = latent_splits(rows, splits)
    tile = tuning.positions if tuning.positions < 32 else 32
    return SplitConfig(own, LATENT_TILE, splits, tile, is_batch)


class PromptSpace:
    """The buffers of a chunk of a prompt, for all blocks: queries without and with RoPE, those for the
    latent vectors, which the results of attention replace, and the results of the heads.
    """

    def __init__(self, specs: Sequence[LatentAttentionSpec], arena: Arena, chunk: int) -> None:
        lengths = [
            max(spec.heads * getattr(spec, name) for spec in specs)
            for name in ("nope_dim", "rope_dim", "latent_dim", "value_dim")
        ]
        self.nope, self.ropes, self.latents, self.attn_out = (
            arena.take((chunk * length,), torch.float16) for length in lengths
        )


def prefill(prompt: "Prefill", chunk: "Chunk", number: int, block: "PromptBlock") -> None:
    """x += latent attention of a chunk of tokens; its rows are written to the cache."""
    spec, w, h, start = block.residual.block, block.weights, chunk.h, chunk.start
    space, products, tokens = prompt.space("latent_attention"), prompt.products, len(chunk.x)
    cache = block.state or prompt.host_states("latent_attention").fetch(block.index, start)
    config = latent_config(spec, cache, is_paged=chunk.pages is not None)
    args = cache.args._replace(pages=chunk.pages)
    projected, scales = products.stacked(h.rows, w.projections), h.scales
    rows = projected[:, w.cache_at(spec, padded=False) :]
    latent_rows_kernel[(tokens,)](
        rows, rows.stride(0), scales, w.latent_norm, spec.norm.epsilon, w.table, args, chunk.words,
        LATENT=config, IN_STEP=False, DEPENDENT=False, num_warps=4,
    )  # fmt: skip
    if w.queries is not None:
        inner = products.hidden(tokens, spec.query_rank)
        # The rows' scales cancel out in the norm.
        norm_rows(projected[:, : spec.query_rank], spec.norm, w.query_norm, None, inner.rows, inner.scales)
        projected, scales = products.stacked(inner.rows, w.queries), inner.scales
    nope, ropes, latents, attn_out = (
        buffer[: tokens * spec.heads * length].view(tokens, spec.heads, length)
        for buffer, length in (
            (space.nope, spec.nope_dim),
            (space.ropes, spec.rope_dim),
            (space.latents, spec.latent_dim),
            (space.attn_out, spec.value_dim),
        )
    )
    latent_queries_kernel[(tokens, spec.heads)](
        projected, projected.stride(0), scales, w.table, nope, ropes, chunk.words,
        LATENT=config, OUT=None, IN_STEP=False, DEPENDENT=False, num_warps=1,
    )  # fmt: skip
    products.by_head(nope, w.keys, latents)
    if cache.keys.dtype == torch.int32:
        transform_heads(latents)
        transform_heads(ropes)
    attend_chunk(latents, ropes, args, chunk.words, spec, config, chunk_tile(config, prompt.capability))
    if cache.keys.dtype == torch.int32:
        transform_heads(latents)
    if block.state is None:
        prompt.host_states("latent_attention").put_back(block.index, cache, start, tokens)
    products.by_head(latents, w.values, attn_out)
    y = products.product(attn_out.view(tokens, -1), w.output)
    prompt.add(chunk, number, y, None)


def attend_chunk(
    latents: Tensor,
    ropes: Tensor,
    cache: CacheArgs,
    words: Tensor,
    spec: LatentAttentionSpec,
    config: LatentConfig,
    tile: AttentionTile,
) -> None:
    """Replace the queries for latent vectors (tokens, heads, latent_dim) of a chunk, whose first position is
    in its `words`, by the results of attention.
    """
    tokens = len(latents)
    latent_chunk_kernel[(-(-tokens * spec.heads // tile.rows),)](
        latents, ropes, cache, words, tokens, spec.scale,
        LATENT=config, ROWS=tile.rows, POSITIONS=tile.positions,
        num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip


def chunk_tile(config: LatentConfig, capability: int) -> AttentionTile:
    """The tile config for a GPU; `capability`: ten times its compute capability, 0: interpreted."""
    if capability not in (80, 90, 100):  # Others have 99 KiB of shared memory.
        return AttentionTile(16 if config.has_recent else 32, 16, 8, 1)
    if config.cache == 0 and not config.has_recent:
        return AttentionTile(32, 64, 8, 2)
    return AttentionTile(32, 16 if config.has_recent else 32, 8, 1)
