"""Prefill attention over the cache: causal flash attention with grouped heads and windows."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from edgeinfer_kernels.blocks.attention import AttentionSpec
from edgeinfer_kernels.cuda.triton_ops.cache_tiles import (
    CACHES,
    Q4_0,
    cache_rows,
    hadamard_f16,
    load_cache_tile,
    load_recent_tiles,
)
from edgeinfer_kernels.cuda.triton_ops.kernel_args import CacheArgs
from edgeinfer_kernels.cuda.triton_ops.step_words import (
    head_slopes,
    oldest_visible,
    recent_from,
    step_start,
)
from edgeinfer_kernels.cuda.tuning.step_shapes import next_power_of_two
from edgeinfer_kernels.sizes.cuda_matrices import head_dimensions

LOG2_E = tl.constexpr(1.4426950408889634)
HADAMARD_ELEMENTS = 4096
"""Elements of heads that a program multiplies with the Hadamard matrix."""


class PromptConfig(NamedTuple):
    """The attention of a prompt; …dimensions: head_dim and value_dim, padded; rows, positions: those of a
    tile; is_ring: the cache is a ring; is_chunked: windows are chunks; is_paged: the cache has pages;
    has_recent: and recent positions.
    """

    heads: int
    group: int
    head_dim: int
    dimensions: int
    value_dim: int
    value_dimensions: int
    rows: int
    positions: int
    key_type: int
    value_type: int
    has_window: bool
    is_capped: bool
    has_sinks: bool
    is_ring: bool
    has_alibi: bool = False
    is_chunked: bool = False
    is_paged: bool = False
    has_recent: bool = False


@triton.jit
def _attend_tiles(
    q, own_position, slopes, head, best, total, attn_out, first, last, cache, scale, window, soft_cap,
    PROMPT: tl.constexpr, MASKED: tl.constexpr, RECENT: tl.constexpr,
):  # fmt: skip
    """Add tiles of positions first… up to (not including) `last` to the online softmax; MASKED: some rows do
    not attend to all of them; RECENT: as recent positions.
    """
    HEAD_DIM: tl.constexpr = PROMPT.head_dim
    DIMENSIONS: tl.constexpr = PROMPT.dimensions
    BLOCK_N: tl.constexpr = PROMPT.positions
    for begin in range(first, last, BLOCK_N):
        seen = begin + tl.arange(0, BLOCK_N)
        within = seen < last
        if RECENT:
            k, v = load_recent_tiles(seen, within, cache, cache.pages, head, PROMPT)
        else:
            rows = cache_rows(seen, begin, within, cache, cache.pages, PROMPT)
            k = load_cache_tile(
                cache.k, cache.k_scales, head, rows, within, cache.capacity, HEAD_DIM, DIMENSIONS,
                PROMPT.key_type,
            )  # fmt: skip
        scores = tl.dot(q, tl.trans(k))
        if PROMPT.is_capped:
            # tanh z = 1 - 2 / (e^2z + 1)
            doubled = tl.exp2(scores * (2.0 * scale / soft_cap * LOG2_E))
            scores = (soft_cap * LOG2_E) * (1.0 - 2.0 / (doubled + 1.0))
        else:
            scores = scores * (scale * LOG2_E)
        if PROMPT.has_alibi:
            distance = own_position[:, None] - seen[None, :]
            scores -= (slopes * LOG2_E)[:, None] * distance.to(tl.float32)
        if MASKED:
            visible = seen[None, :] <= own_position[:, None]
            if PROMPT.has_window:
                oldest = oldest_visible(own_position, window, PROMPT.is_chunked)
                visible = visible & (seen[None, :] >= oldest[:, None])
            if RECENT:
                visible = visible & (seen[None, :] >= recent_from(own_position)[:, None])
            elif PROMPT.has_recent:
                visible = visible & (seen[None, :] < recent_from(own_position)[:, None])
            scores = tl.where(visible, scores, float("-inf"))
        now = tl.maximum(best, tl.max(scores, axis=1))
        # A row without visible positions so far has the maximum -inf, which must not be subtracted from
        # itself.
        level = tl.where(now == float("-inf"), 0.0, now)
        shares = tl.exp2(scores - level[:, None])
        decay = tl.exp2(best - level)
        total = total * decay + tl.sum(shares, axis=1)
        if not RECENT:
            v = load_cache_tile(
                cache.v, cache.v_scales, head, rows, within, cache.capacity, PROMPT.value_dim,
                PROMPT.value_dimensions, PROMPT.value_type,
            )  # fmt: skip
        attn_out = tl.dot(shares.to(tl.float16), v, attn_out * decay[:, None])
        best = now
    return best, total, attn_out


@triton.jit(do_not_specialize=["tokens"])
def flash_attention_kernel(
    queries, cache, out, sinks, slopes, words, tokens, scale, window, soft_cap, PROMPT: tl.constexpr
):
    """softmax(cap(q · k · scale) where visible) · v, for the queries of some tokens and one KV head as rows.

    sinks: one more score of every query head, without a value. slopes: those of ALiBi.

    The last tokens, which attend to the most positions, are scheduled first. Reads the visible keys and
    values once per rows // group tokens, mostly from cache; writes tokens · heads · value_dim · 2 bytes.
    """
    GROUP: tl.constexpr = PROMPT.group
    HEAD_DIM: tl.constexpr = PROMPT.head_dim
    DIMENSIONS: tl.constexpr = PROMPT.dimensions
    VALUE_DIM: tl.constexpr = PROMPT.value_dim
    VALUE_DIMENSIONS: tl.constexpr = PROMPT.value_dimensions
    BLOCK_M: tl.constexpr = PROMPT.rows
    BLOCK_N: tl.constexpr = PROMPT.positions
    TILE_TOKENS: tl.constexpr = BLOCK_M // GROUP
    first_token = (tl.num_programs(0) - 1 - tl.program_id(0)) * TILE_TOKENS
    head = tl.program_id(1)
    start = step_start(words)
    row = tl.arange(0, BLOCK_M)
    token = first_token + row // GROUP
    rows_mask = (row < TILE_TOKENS * GROUP) & (token < tokens)
    own_position = start + token
    dimension = tl.arange(0, DIMENSIONS)
    query = token.to(tl.int64) * PROMPT.heads + head * GROUP + row % GROUP
    at = query[:, None] * HEAD_DIM + dimension[None, :]
    mask = rows_mask[:, None] & (dimension < HEAD_DIM)[None, :]
    q = tl.load(queries + at, mask=mask, other=0.0)

    slope = head_slopes(slopes, head * GROUP + row % GROUP, PROMPT.has_alibi)
    best = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_M,), tl.float32)
    attn_out = tl.zeros((BLOCK_M, VALUE_DIMENSIONS), tl.float32)
    lowest, highest = start + first_token, start + tl.minimum(first_token + TILE_TOKENS, tokens)
    own_first, own_last = lowest, highest - 1
    if PROMPT.has_recent:
        near = recent_from(lowest)
        best, total, attn_out = _attend_tiles(
            q, own_position, slope, head, best, total, attn_out, near, highest,
            cache, scale, window, soft_cap, PROMPT, True, True,
        )  # fmt: skip
        # Positions before these are read in the cache, by all rows up to `lowest`, by some up to `highest`.
        lowest, highest = near - 1, recent_from(highest - 1)
    begin = 0
    # Whole tiles that every row attends to: after the start of all windows, up to the first row's position.
    open_from = 0
    if PROMPT.has_window:
        begin = tl.maximum(oldest_visible(own_first, window, PROMPT.is_chunked), 0) // BLOCK_N * BLOCK_N
        newest = oldest_visible(own_last, window, PROMPT.is_chunked)
        open_from = tl.cdiv(tl.maximum(newest, 0), BLOCK_N) * BLOCK_N
    open_to = (lowest + 1) // BLOCK_N * BLOCK_N
    if PROMPT.has_window:
        open_from = tl.minimum(open_from, tl.cdiv(highest, BLOCK_N) * BLOCK_N)
        open_to = tl.maximum(open_to, open_from)
        best, total, attn_out = _attend_tiles(
            q, own_position, slope, head, best, total, attn_out, begin, tl.minimum(open_from, highest),
            cache, scale, window, soft_cap, PROMPT, True, False,
        )  # fmt: skip
    best, total, attn_out = _attend_tiles(
        q, own_position, slope, head, best, total, attn_out, open_from, open_to,
        cache, scale, window, soft_cap, PROMPT, False, False,
    )  # fmt: skip
    best, total, attn_out = _attend_tiles(
        q, own_position, slope, head, best, total, attn_out, open_to, highest,
        cache, scale, window, soft_cap, PROMPT, True, False,
    )  # fmt: skip
    if PROMPT.has_sinks:
        sink = tl.load(sinks + head * GROUP + row % GROUP) * LOG2_E
        top = tl.maximum(best, sink)
        decay = tl.exp2(best - top)
        total = total * decay + tl.exp2(sink - top)
        attn_out = attn_out * decay[:, None]
    attn_out = attn_out / tl.where(rows_mask, total, 1.0)[:, None]
    if VALUE_DIM != HEAD_DIM:
        dimension = tl.arange(0, VALUE_DIMENSIONS)
        at = query[:, None] * VALUE_DIM + dimension[None, :]
        mask = rows_mask[:, None] & (dimension < VALUE_DIM)[None, :]
    tl.store(out + at, attn_out.to(tl.float16), mask=mask)


@triton.jit(do_not_specialize=["count"])
def hadamard_heads_kernel(heads, count, HEAD_DIM: tl.constexpr, DIMENSIONS: tl.constexpr, ROWS: tl.constexpr):
    """Heads (count, HEAD_DIM) float16 times the Hadamard matrix, in place, ROWS per program. Reads and writes
    them once.
    """
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    dimension = tl.arange(0, DIMENSIONS)
    mask = (row < count)[:, None] & (dimension < HEAD_DIM)[None, :]
    at = heads + row.to(tl.int64)[:, None] * HEAD_DIM + dimension[None, :]
    transformed = hadamard_f16(tl.load(at, mask=mask, other=0.0), HEAD_DIM)
    tl.debug_barrier()  # As in `residual_kernel`.
    tl.store(at, transformed, mask=mask)


@dataclass(frozen=True)
class AttentionTile:
    """The tile config of the kernel: rows and positions of a tile, warps, pipeline stages."""

    rows: int
    positions: int
    warps: int
    stages: int


def attention_tile(head_dim: int, group: int, capability: int, quantized: bool = False) -> AttentionTile:
    """A tile config for the shared memory of the target (sm_75: 64 KiB; 86, 89, 120: 99; 80: 163; 90, 100:
    227).
    """
    wide = next_power_of_two(head_dim)
    if capability < 80:
        # Without tensor core support in Triton, scores are sums in registers, and few fit.
        rows, positions, warps, stages = (
            (64, 32, 8, 1) if wide <= 64 else (32 if wide <= 128 else 16, 32, 8, 1)
        )
    elif wide > 256:
        rows, positions, warps, stages = (64, 32, 8, 1) if capability in (80, 90, 100) else (32, 16, 8, 1)
    elif capability in (80, 90, 100):
        rows, positions, warps, stages = (128, 64, 8, 3) if wide <= 128 else (64, 64, 8, 2)
    elif wide <= 64:
        rows, positions, warps, stages = 64, 64, 4, 2
    else:
        rows, positions, warps, stages = (128, 32, 8, 2) if wide <= 128 else (64, 32, 8, 1)
    if quantized and (wide > 128 or (wide > 64 and capability <= 80)):
        positions //= 2  # Decoding a tile needs additional registers.
    return AttentionTile(max(rows, next_power_of_two(group)), positions, warps, stages)


def flash_attention(
    queries: torch.Tensor,
    cache: CacheArgs,
    words: torch.Tensor,
    spec: AttentionSpec,
    out: torch.Tensor,
    tile: AttentionTile,
    sinks: torch.Tensor | None = None,
    is_ring: bool = False,
    slopes: torch.Tensor | None = None,
) -> None:
    """out (tokens, heads · value_dim) float16 from queries (tokens, heads, head_dim) float16 of a chunk,
    whose first position is in its `words`.

    The cache (kv_heads, positions, head_dim) of keys, and of values with value_dim elements, holds all
    positions up to the end of the chunk, or as a ring the last ones. Their types: `cache_tiles.CACHES`; for
    keys in q4_0 the queries are multiplied with the Hadamard matrix too. sinks (heads,): one more score per
    head; slopes (heads,): those of ALiBi.
    """
    tokens, heads, head_dim = queries.shape
    group, value_type = heads // spec.kv_heads, CACHES[cache.v.dtype]
    prompt = PromptConfig(
        heads, group, head_dim, head_dimensions(head_dim), spec.value_dim, head_dimensions(spec.value_dim),
        tile.rows, tile.positions, int(CACHES[cache.k.dtype]), int(value_type),
        has_window=spec.window > 0, is_capped=spec.soft_cap > 0, has_sinks=sinks is not None,
        is_ring=is_ring, is_chunked=spec.chunked, has_alibi=slopes is not None,
        is_paged=cache.pages is not None, has_recent=cache.recent is not None,
    )  # fmt: skip
    flash_attention_kernel[(-(-tokens // (tile.rows // group)), spec.kv_heads)](
        queries, cache, out, sinks, slopes, words, tokens, spec.scale, spec.window, spec.soft_cap,
        PROMPT=prompt, num_warps=tile.warps, num_stages=tile.stages,
    )  # fmt: skip
    if value_type == Q4_0:
        transform_heads(out.view(tokens, heads, spec.value_dim))


def transform_heads(heads: torch.Tensor) -> None:
    """Multiply heads (tokens, heads, head_dim) float16 with the Hadamard matrix, in place."""
    tokens, count, head_dim = heads.shape
    dimensions = next_power_of_two(head_dim)
    rows = max(HADAMARD_ELEMENTS // dimensions, 1)
    hadamard_heads_kernel[(-(-tokens * count // rows),)](
        heads, tokens * count, HEAD_DIM=head_dim, DIMENSIONS=dimensions, ROWS=rows, num_warps=4
    )
