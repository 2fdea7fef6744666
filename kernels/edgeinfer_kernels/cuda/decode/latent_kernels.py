"""Kernels of latent attention: rows of the cache and queries from projections, and attention over the cache.

The latent vectors of the cache are its keys `k`, the keys' elements with RoPE its values `v`. A row of
queries belongs to a token and a head; the rows of a token are contiguous.
"""

import triton
import triton.language as tl

from edgeinfer_kernels.cuda.blocks.common.attention_splits import MASKED_SCORE
from edgeinfer_kernels.cuda.decode.decode_attention import (
    RECENT_TILE,
    add_scores,
)
from edgeinfer_kernels.cuda.decode.step_rope import NEW, visible_new
from edgeinfer_kernels.cuda.triton_ops.cache_tiles import (
    F16,
    Q4_0,
    cache_rows,
    hadamard,
    hadamard_f16,
    load_cache_tile,
    recent_rows,
    store_cache_rows,
    store_recent_rows,
)
from edgeinfer_kernels.cuda.triton_ops.step_words import (
    CACHED_AT,
    POSITIONS_AT,
    read_in_cache,
    recent_from,
    split_range,
    step_start,
    with_temperature,
)
from edgeinfer_kernels.cuda.triton_ops.tiles import quantize, release_consumers, wait_for_producers

LARGEST_F16 = tl.constexpr(65504.0)


@triton.jit
def _token_position(words, token, IN_STEP: tl.constexpr):
    """The position of a token of a step or of a chunk."""
    if IN_STEP:
        return tl.load(words + POSITIONS_AT + token)
    else:
        return step_start(words) + token


@triton.jit
def _token_row(words, token, position, cache, LATENT: tl.constexpr, IN_STEP: tl.constexpr):
    """The cache row (1,) of a token of a step or of a chunk."""
    at = _token_place(words, token, position, LATENT, IN_STEP)
    pages = _token_pages(token, cache, LATENT)
    return cache_rows(at, at, at >= 0, cache, pages, LATENT).to(tl.int64)


@triton.jit
def _recent_row(words, token, position, cache, LATENT: tl.constexpr, IN_STEP: tl.constexpr):
    """As `_token_row`, in the recent positions."""
    at = _token_place(words, token, position, LATENT, IN_STEP)
    pages = _token_pages(token, cache, LATENT)
    return recent_rows(at, at >= 0, cache, pages, LATENT.is_paged).to(tl.int64)


@triton.jit
def _token_place(words, token, position, LATENT: tl.constexpr, IN_STEP: tl.constexpr):
    """Where a token of a step or of a chunk is in its sequence, (1,)."""
    at = position
    if IN_STEP and not LATENT.is_batch:
        at = tl.load(words + CACHED_AT) + token
    return tl.arange(0, 1) + at


@triton.jit
def _token_pages(token, cache, LATENT: tl.constexpr):
    """The pages of a token's sequence."""
    pages = cache.pages
    if LATENT.is_batch:
        pages += token * cache.page_stride
    return pages


@triton.jit
def _with_rope(row, scale, table, position, LATENT: tl.constexpr):
    """The elements with RoPE (1, ropes) at `row`, times `scale`; pairs are half of them apart."""
    ROPE_DIM: tl.constexpr = LATENT.rope_dim
    HALF_DIM: tl.constexpr = ROPE_DIM // 2
    dimension = tl.arange(0, LATENT.ropes)[None, :]
    inside = dimension < ROPE_DIM
    own = tl.load(row + dimension, mask=inside, other=0.0).to(tl.float32) * scale
    if LATENT.has_rope:
        first = dimension < HALF_DIM
        partner = tl.where(first, dimension + HALF_DIM, dimension - HALF_DIM)
        other = tl.load(row + partner, mask=inside, other=0.0).to(tl.float32) * scale
        angle = table + position.to(tl.int64) * ROPE_DIM + dimension % HALF_DIM
        cosine = tl.load(angle, mask=inside, other=0.0)
        sine = tl.load(angle + HALF_DIM, mask=inside, other=0.0)
        own = own * cosine + tl.where(first, -other, other) * sine
    return own


@triton.jit
def latent_rows_kernel(
    projected, stride, row_scales, weight, epsilon, table, cache, words,
    LATENT: tl.constexpr, IN_STEP: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """The cached row of a token: its normed latent vector, and the key's elements after RoPE.

    `projected`: rows of `stride` elements; of a chunk they are still to be multiplied by `row_scales`. Reads
    and writes a row.
    """
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    LATENT_DIM: tl.constexpr = LATENT.latent_dim
    token = tl.program_id(0)
    position = _token_position(words, token, IN_STEP)
    scale = 1.0
    if not IN_STEP:
        scale = tl.load(row_scales + token)
    dimension = tl.arange(0, LATENT.dimensions)[None, :]
    inside = dimension < LATENT_DIM
    row = projected + token.to(tl.int64) * stride
    latent = tl.load(row + dimension, mask=inside, other=0.0).to(tl.float32) * scale
    inverse = tl.rsqrt(tl.sum(latent * latent, axis=1) / LATENT_DIM + epsilon)
    latent = latent * inverse[:, None] * tl.load(weight + dimension, mask=inside, other=0.0)
    tail = _with_rope(row + LATENT_DIM, scale, table, position, LATENT)
    at = _token_row(words, token, position, cache, LATENT, IN_STEP)
    every = at >= 0
    store_cache_rows(cache.k, cache.k_scales, at, every, latent, LATENT_DIM, LATENT.dimensions, LATENT.cache)
    store_cache_rows(cache.v, cache.v_scales, at, every, tail, LATENT.rope_dim, LATENT.ropes, LATENT.cache)
    if LATENT.has_recent:
        near = _recent_row(words, token, position, cache, LATENT, IN_STEP)
        store_recent_rows(cache.recent.k, near, every, latent, LATENT_DIM, LATENT.cache)
        store_recent_rows(cache.recent.v, near, every, tail, LATENT.rope_dim, LATENT.cache)


@triton.jit
def latent_queries_kernel(
    projected, stride, row_scales, table, nope, ropes, words,
    LATENT: tl.constexpr, OUT: tl.constexpr, IN_STEP: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One head's query of a token: the elements without RoPE to `nope`, those after RoPE to `ropes`.

    In a step `nope` are activations and `ropes` float32, in a chunk both are float16. Reads and writes the
    query once.
    """
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    NOPE_DIM: tl.constexpr = LATENT.nope_dim
    ROPE_DIM: tl.constexpr = LATENT.rope_dim
    GROUPS: tl.constexpr = triton.next_power_of_2(NOPE_DIM // 16)
    token, head = tl.program_id(0), tl.program_id(1)
    position = _token_position(words, token, IN_STEP)
    scale = 1.0
    if not IN_STEP:
        scale = tl.load(row_scales + token)
    row = projected + token.to(tl.int64) * stride + head * LATENT.query_dim
    scale = with_temperature(scale, position, LATENT)
    tail = _with_rope(row + NOPE_DIM, scale, table, position, LATENT)
    query = token.to(tl.int64) * LATENT.heads + head
    dimension = tl.arange(0, LATENT.ropes)[None, :]
    tail = tl.minimum(tl.maximum(tail, -LARGEST_F16), LARGEST_F16)
    tl.store(ropes + query * ROPE_DIM + dimension, tail.to(ropes.dtype.element_ty), mask=dimension < ROPE_DIM)
    group = tl.arange(0, GROUPS)
    column = group[:, None] * 16 + tl.arange(0, 16)[None, :]
    value = tl.load(row + column, mask=column < NOPE_DIM, other=0.0).to(tl.float32) * scale
    if IN_STEP:
        target = nope + query * (OUT.planes * OUT.blocks)
        quantize(value, target, group, group < 2 * OUT.blocks, OUT)
    else:
        value = tl.minimum(tl.maximum(value, -LARGEST_F16), LARGEST_F16).to(tl.float16)
        tl.store(nope + query * NOPE_DIM + column, value, mask=column < NOPE_DIM)


@triton.jit
def load_rows(base, row, mask, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Contiguous rows (n,) of WIDTH elements, (n, PADDED), 0 beyond."""
    dimension = tl.arange(0, PADDED)
    inside = mask[:, None] & (dimension < WIDTH)[None, :]
    return tl.load(base + row.to(tl.int64)[:, None] * WIDTH + dimension[None, :], mask=inside, other=0.0)


@triton.jit
def load_latents(cache, pages, at, inside, LATENT: tl.constexpr):
    """Latent vectors and elements with RoPE of positions `at`."""
    at = cache_rows(at, at, inside, cache, pages, LATENT)
    head = tl.program_id(0) * 0
    latents = load_cache_tile(
        cache.k, cache.k_scales, head, at, inside, cache.capacity, LATENT.latent_dim,
        LATENT.dimensions, LATENT.cache,
    )  # fmt: skip
    tails = load_cache_tile(
        cache.v, cache.v_scales, head, at, inside, cache.capacity, LATENT.rope_dim,
        LATENT.ropes, LATENT.cache,
    )  # fmt: skip
    return latents, tails


@triton.jit
def load_recent_latents(cache, pages, at, inside, LATENT: tl.constexpr):
    """As `load_latents`, of recent positions."""
    rows = recent_rows(at, inside, cache, pages, LATENT.is_paged)
    head = tl.program_id(0) * 0
    capacity = cache.recent.capacity
    latents = load_cache_tile(
        cache.recent.k, cache.recent.k, head, rows, inside, capacity, LATENT.latent_dim, LATENT.dimensions,
        F16,
    )  # fmt: skip
    tails = load_cache_tile(
        cache.recent.v, cache.recent.v, head, rows, inside, capacity, LATENT.rope_dim, LATENT.ropes, F16
    )
    return latents, tails


@triton.jit
def latent_scores(queries, tails, latents, cached_tails):
    """Dot products of both parts of queries and cached rows."""
    return tl.dot(queries, tl.trans(latents)) + tl.dot(tails, tl.trans(cached_tails))


@triton.jit
def _attend_recent(
    query, tail, cache, pages, position, cached, highest, total, attn_out, scale, LATENT: tl.constexpr
):
    """Add the recent positions before a step to the online softmax, a page at a time."""
    for start in range(recent_from(cached), cached, RECENT_TILE):
        at = start + tl.arange(0, RECENT_TILE)
        inside = at < cached
        latents, tails = load_recent_latents(cache, pages, at, inside, LATENT)
        visible = inside[None, :] & (at[None, :] >= recent_from(position)[:, None])
        scores = latent_scores(query, tail, latents, tails) * scale
        highest, total, attn_out = add_scores(scores, latents, visible, highest, total, attn_out)
    return highest, total, attn_out


@triton.jit
def latent_step_kernel(
    queries, ropes, cache, state, scale, results,
    LATENT: tl.constexpr, SPLIT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Attention of a step's queries over a KV split; program (tile of query rows, split), in a batch (tile,
    split, token), where a sequence has consecutive tokens.

    queries (tokens · heads, latent_dim) and ropes (tokens · heads, rope_dim) float32. `state`: as for
    `decode_attention_kernel`; the new tokens' rows are in the cache already. `latent_combine_kernel` adds up
    the splits. Reads every cached row once per tile of query rows.
    """
    release_consumers(DEPENDENT)
    HEADS: tl.constexpr = LATENT.heads
    LATENT_DIM: tl.constexpr = LATENT.latent_dim
    DIMENSIONS: tl.constexpr = LATENT.dimensions
    ROPE_DIM: tl.constexpr = LATENT.rope_dim
    TOKENS: tl.constexpr = SPLIT.tokens
    QUERIES: tl.constexpr = SPLIT.queries
    SPLITS: tl.constexpr = SPLIT.splits
    POSITIONS: tl.constexpr = SPLIT.positions
    tile, split = tl.program_id(0), tl.program_id(1)
    pages = cache.pages
    if LATENT.is_batch:
        sequence = tl.program_id(2)
        state += sequence
        pages += sequence * cache.page_stride
        cached = tl.load(state + POSITIONS_AT)
    else:
        sequence = 0
        cached = tl.load(state + CACHED_AT)
    row = tile * QUERIES + tl.arange(0, QUERIES)
    token, is_query = row // HEADS, row < HEADS * TOKENS
    query_row = sequence * HEADS + row
    end = read_in_cache(cached, TOKENS, LATENT.has_recent)
    first, last, used = split_range(cached, end, split, SPLITS, POSITIONS, 0)
    wait_for_producers(DEPENDENT)
    query = load_rows(queries, query_row, is_query, LATENT_DIM, DIMENSIONS)
    tail = load_rows(ropes, query_row, is_query, ROPE_DIM, LATENT.ropes)
    if LATENT.cache == Q4_0:
        query, tail = hadamard_f16(query, LATENT_DIM), hadamard_f16(tail, ROPE_DIM)
    query, tail = query.to(tl.float16), tail.to(tl.float16)
    position = tl.load(state + POSITIONS_AT + token, mask=is_query, other=0)
    highest = tl.zeros((QUERIES,), tl.float32) + MASKED_SCORE
    total = tl.zeros((QUERIES,), tl.float32)
    attn_out = tl.zeros((QUERIES, DIMENSIONS), tl.float32)
    if split == 0:
        new = tl.arange(0, NEW)
        if LATENT.has_recent:
            latents, tails = load_recent_latents(cache, pages, cached + new, new < TOKENS, LATENT)
        else:
            latents, tails = load_latents(cache, pages, cached + new, new < TOKENS, LATENT)
        # In a batch the earlier new tokens of a sequence are cached positions.
        visible = visible_new(state, token, is_query, token, TOKENS, 0) & (new < TOKENS)[None, :]
        scores = latent_scores(query, tail, latents, tails) * scale
        highest, total, attn_out = add_scores(scores, latents, visible, highest, total, attn_out)
        if LATENT.has_recent:
            highest, total, attn_out = _attend_recent(
                query, tail, cache, pages, position, cached, highest, total, attn_out, scale, LATENT
            )
    for start in range(first, last, POSITIONS):
        at = start + tl.arange(0, POSITIONS)
        inside = at < last
        latents, tails = load_latents(cache, pages, at, inside, LATENT)
        visible = inside[None, :] & is_query[:, None]
        if LATENT.has_recent:
            visible = visible & (at[None, :] < recent_from(position)[:, None])
        scores = latent_scores(query, tail, latents, tails) * scale
        highest, total, attn_out = add_scores(scores, latents, visible, highest, total, attn_out)
    dimension = tl.arange(0, DIMENSIONS)
    tiles: tl.constexpr = (HEADS + QUERIES - 1) // QUERIES
    part = ((sequence * tiles + tile) * SPLITS + split) * QUERIES + tl.arange(0, QUERIES)
    stored = is_query & (split < used)
    tl.store(results.parts + part[:, None] * DIMENSIONS + dimension[None, :], attn_out, mask=stored[:, None])
    tl.store(results.peaks + part * 2, highest, mask=stored)
    tl.store(results.peaks + part * 2 + 1, total, mask=stored)


@triton.jit
def latent_combine_kernel(
    results, state, out, LATENT: tl.constexpr, SPLIT: tl.constexpr, OUT: tl.constexpr, DEPENDENT: tl.constexpr
):
    """Add up the KV splits of a query row, in their order; a program per row writes it as activations.

    Reads splits · latent_dim · 4 bytes.
    """
    release_consumers(DEPENDENT)
    DIMENSIONS: tl.constexpr = LATENT.dimensions
    QUERIES: tl.constexpr = SPLIT.queries
    SPLITS: tl.constexpr = SPLIT.splits
    row = tl.program_id(0)
    if LATENT.is_batch:
        sequence, head = row // LATENT.heads, row % LATENT.heads
        cached = tl.load(state + POSITIONS_AT + sequence)
        tile = sequence * ((LATENT.heads + QUERIES - 1) // QUERIES) + head // QUERIES
    else:
        head = row
        cached = tl.load(state + CACHED_AT)
        tile = row // QUERIES
    end = read_in_cache(cached, SPLIT.tokens, LATENT.has_recent)
    _, _, used = split_range(cached, end, 0, SPLITS, SPLIT.positions, 0)
    wait_for_producers(DEPENDENT)
    first = tile * SPLITS * QUERIES + head % QUERIES
    index = tl.arange(0, triton.next_power_of_2(SPLITS))
    counted = index < used
    peaks = tl.load(results.peaks + (first + index * QUERIES) * 2, mask=counted, other=MASKED_SCORE)
    totals = tl.load(results.peaks + (first + index * QUERIES) * 2 + 1, mask=counted, other=0.0)
    peak = tl.max(peaks, axis=0)
    total = tl.sum(tl.exp2(peaks - peak) * totals, axis=0)
    dimension = tl.arange(0, DIMENSIONS)
    attn_out = tl.zeros((DIMENSIONS,), tl.float32)
    for split in range(used):
        part = first + split * QUERIES
        weight = tl.exp2(tl.load(results.peaks + part * 2) - peak)
        attn_out += weight * tl.load(results.parts + part * DIMENSIONS + dimension)
    attn_out = attn_out / tl.where(total > 0, total, 1.0)
    if LATENT.cache == Q4_0:
        attn_out = tl.reshape(hadamard(attn_out[None, :], LATENT.latent_dim), (DIMENSIONS,))
    group = tl.arange(0, DIMENSIONS // 16)
    values = tl.reshape(attn_out, (DIMENSIONS // 16, 16))
    target = out + row * (OUT.planes * OUT.blocks)
    quantize(values, target, group, group < LATENT.latent_dim // 16, OUT)
