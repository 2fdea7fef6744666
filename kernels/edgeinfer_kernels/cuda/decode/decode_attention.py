"""Attention of a decode step: up to 16 new tokens over a long cache, with KV splits along the positions.

One kernel computes the q and k norm, RoPE, the append to the cache, the attention and the quantization of its
result. A program processes one KV head, with all its query heads of a token, or, if the cache is long, of up
to eight tokens, and one KV split; the new tokens are in the first split without cached positions, if there is
one. The program that finishes last adds up the splits, in a fixed order; for several tokens another kernel
does that, with a program for each query head.
"""

import triton
import triton.language as tl

from edgeinfer_kernels.cuda.blocks.common.attention_splits import (
    LOG2_E,
    MASKED_SCORE,
    combine_splits,
    padded_group,
    parts_of,
)
from edgeinfer_kernels.cuda.decode.step_rope import (
    HEAD_QK_NORM,
    ROW_QK_NORM,
    append_new,
    new_positions,
    rope_heads,
    row_inverses,
)
from edgeinfer_kernels.cuda.triton_ops.cache_tiles import (
    Q4_0,
    cache_rows,
    hadamard_f16,
    load_cache_tile,
    load_recent_tiles,
    prefetch_cache_rows,
    prefetch_lines,
)
from edgeinfer_kernels.cuda.triton_ops.step_words import (
    CACHED_AT,
    POSITIONS_AT,
    first_of_sequence,
    head_slopes,
    oldest_visible,
    read_in_cache,
    recent_from,
    scaled_queries,
    split_range,
)
from edgeinfer_kernels.cuda.triton_ops.tiles import release_consumers, wait_for_producers

EARLY_SPLITS = 16
"""KV splits up to which programs end early."""
RECENT_TILE = tl.constexpr(16)
"""Recent positions of a tile."""


@triton.jit
def _attend(
    queries, keys, values, visible, distance, slopes, highest, total, attn_out, scale, cap,
    ATTENTION: tl.constexpr,
):  # fmt: skip
    """One tile of the online softmax; `distance` (queries, keys): from the keys to the queries."""
    scores = tl.dot(queries, tl.trans(keys)) * scale
    if ATTENTION.is_capped:
        scores = cap * (1.0 - 2.0 / (tl.exp(2.0 * scores / cap) + 1.0))
    if ATTENTION.has_alibi:
        scores -= slopes[:, None] * distance.to(tl.float32)
    return add_scores(scores, values, visible, highest, total, attn_out)


@triton.jit
def add_scores(scores, values, visible, highest, total, attn_out):
    """Add a tile of scores to the online softmax, whose exponentials are powers of two."""
    scores = tl.where(visible, scores * LOG2_E, MASKED_SCORE)
    peak = tl.maximum(highest, tl.max(scores, axis=1))
    shrink = tl.exp2(highest - peak)
    weights = tl.where(visible, tl.exp2(scores - peak[:, None]), 0.0)
    total = total * shrink + tl.sum(weights, axis=1)
    attn_out = tl.dot(weights.to(tl.float16), values, attn_out * shrink[:, None])
    return peak, total, attn_out


@triton.jit
def _attend_cached(
    queries, cache, pages, head, row, position, slopes, first, last, highest, total, attn_out, scale, cap,
    ATTENTION: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Add the cached positions first… up to (not including) `last` to the online softmax."""
    HEAD_DIM: tl.constexpr = ATTENTION.head_dim
    DIMENSIONS: tl.constexpr = ATTENTION.dimensions
    WINDOW: tl.constexpr = ATTENTION.window
    POSITIONS: tl.constexpr = SPLIT.positions
    offset = tl.arange(0, POSITIONS)
    for start in range(first, last, POSITIONS):
        at = start + offset
        inside = at < last
        rows = cache_rows(at, start, inside, cache, pages, ATTENTION)
        key_tile = load_cache_tile(
            cache.k, cache.k_scales, head, rows, inside, cache.capacity, HEAD_DIM, DIMENSIONS,
            ATTENTION.key_type,
        )  # fmt: skip
        value_tile = load_cache_tile(
            cache.v, cache.v_scales, head, rows, inside, cache.capacity, ATTENTION.value_dim,
            ATTENTION.value_dimensions, ATTENTION.value_type,
        )  # fmt: skip
        visible = inside[None, :] & (row >= 0)[:, None]
        if ATTENTION.has_recent:
            visible = visible & (at[None, :] < recent_from(position)[:, None])
        distance = position[:, None] - at[None, :]
        if WINDOW > 0:
            oldest = oldest_visible(position, WINDOW, ATTENTION.is_chunked)
            visible = visible & (at[None, :] >= oldest[:, None])
        highest, total, attn_out = _attend(
            queries, key_tile, value_tile, visible, distance, slopes, highest, total, attn_out, scale, cap,
            ATTENTION,
        )  # fmt: skip
    return highest, total, attn_out


@triton.jit
def _attend_new(
    queries, new, visible, distance, cache, pages, head, position, slopes, cached, highest, total, attn_out,
    scale, cap, ATTENTION: tl.constexpr,
):  # fmt: skip
    """Add the keys and values of the step's `new` tokens to the online softmax, and the recent positions
    before it, a page at a time.
    """
    highest, total, attn_out = _attend(
        queries, new[0], new[1], visible, distance, slopes, highest, total, attn_out, scale, cap, ATTENTION
    )
    if ATTENTION.has_recent:
        for start in range(recent_from(cached), cached, RECENT_TILE):
            at = start + tl.arange(0, RECENT_TILE)
            inside = at < cached
            keys, values = load_recent_tiles(at, inside, cache, pages, head, ATTENTION)
            visible = inside[None, :] & (at[None, :] >= recent_from(position)[:, None])
            if ATTENTION.window > 0:
                oldest = oldest_visible(position, ATTENTION.window, ATTENTION.is_chunked)
                visible = visible & (at[None, :] >= oldest[:, None])
            distance = position[:, None] - at[None, :]
            highest, total, attn_out = _attend(
                queries, keys, values, visible, distance, slopes, highest, total, attn_out, scale, cap,
                ATTENTION,
            )  # fmt: skip
    return highest, total, attn_out


@triton.jit
def _step_queries(
    qkv, stride, state, rope, head, token, member, is_query, position, count, ATTENTION: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """The queries of some tokens, of a KV head's query heads `member`, (QUERIES, DIMENSIONS) float16, with
    norm and RoPE.
    """
    GROUP: tl.constexpr = ATTENTION.group
    HEAD_DIM: tl.constexpr = ATTENTION.head_dim
    QK_NORM: tl.constexpr = ATTENTION.qk_norm
    width: tl.constexpr = ATTENTION.kv_heads * GROUP * HEAD_DIM
    inverses = row_inverses(qkv, stride, token, count, TOKENS, width, QK_NORM, rope.epsilon)
    q_at = (head * GROUP + member) * ATTENTION.q_head
    norm_at = q_at if QK_NORM == ROW_QK_NORM else q_at * 0
    base = qkv + token * stride + q_at
    queries = rope_heads(
        base, token, is_query, state + POSITIONS_AT, rope, rope.q_norm, norm_at, inverses, ATTENTION
    )
    queries = scaled_queries(queries, rope.query_weights, position[:, None], ATTENTION)
    if ATTENTION.key_type == Q4_0:
        queries = hadamard_f16(queries, HEAD_DIM)
    return queries.to(tl.float16)


@triton.jit
def _own_sequence(state, qkv, stride, tile, SPLIT: tl.constexpr):
    """The words and rows of a program's sequence, the first token of its queries, the number of new tokens
    that they may attend to, and the sequence's cached positions.
    """
    if SPLIT.is_batch:
        first_row = first_of_sequence(state, tile)
        first_token = tile - first_row
        count = first_token + 1
        state += first_row
        qkv += first_row.to(tl.int64) * stride
        cached = tl.load(state + POSITIONS_AT)
    else:
        first_token = tile * SPLIT.query_tokens
        count = SPLIT.tokens
        cached = tl.load(state + CACHED_AT)
    return state, qkv, first_token, count, cached


@triton.constexpr_function
def ends_early(splits):
    """Whether programs of an empty KV split end at once, and others request what they read before they wait.
    With many splits, of a large cache, steps of one token are slower so.
    """
    return splits <= EARLY_SPLITS


@triton.jit
def _prefetch(cache, pages, head, first, last, position, rope, ATTENTION: tl.constexpr, SPLIT: tl.constexpr):
    """Request what a program reads besides the projection for the L2 cache: the first tile of cached
    positions, and the cosines and sines of the queries.
    """
    HEAD_DIM: tl.constexpr = ATTENTION.head_dim
    LINES: tl.constexpr = triton.next_power_of_2((HEAD_DIM + 31) // 32)
    column = tl.minimum(tl.arange(0, LINES) * 32, HEAD_DIM - 1)
    prefetch_lines(rope.table + (position * HEAD_DIM)[:, None] + column[None, :])
    if ATTENTION.qk_norm == HEAD_QK_NORM:
        prefetch_lines(rope.q_norm + column)
        prefetch_lines(rope.k_norm + column)
    if first < last:
        at = tl.minimum(first + tl.arange(0, SPLIT.positions), last - 1)
        rows = cache_rows(at, first, at < last, cache, pages, ATTENTION)
        prefetch_cache_rows(cache.k, head, rows, cache.capacity, HEAD_DIM, ATTENTION.key_type)
        prefetch_cache_rows(cache.v, head, rows, cache.capacity, ATTENTION.value_dim, ATTENTION.value_type)


@triton.jit
def decode_attention_kernel(
    qkv, stride, cache, state, rope, scale, cap, results, out, flat, sinks, ATTENTION: tl.constexpr,
    SPLIT: tl.constexpr, OUT: tl.constexpr, DIRECT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Attention of the step's new tokens; program (KV head, KV split, query tile), in a batch (KV head, KV
    split, token), where a sequence has consecutive tokens, and all positions before them are cached.

    `qkv` (tokens, stride) float32: q, then k and v. `state` int32: ids, positions, masks (bit j of a token's
    mask: it attends to token j of the step, in a batch of its sequence), cached length. Appends the new keys
    and values to the cache, and to its recent positions, if it has these. The result is written to `out` as
    activations if DIRECT, else, if a head does not fill groups of 16, to `flat` (tokens, heads · value_dim)
    float32. `sinks`: one more score of every query head, without a value. Reads every cached key and value
    once for a query tile; each tile appends the same keys and values.
    """
    release_consumers(DEPENDENT)
    SPLITS: tl.constexpr = SPLIT.splits
    head, split, tile = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    own, rows, first_token, count, cached = _own_sequence(state, qkv, stride, tile, SPLIT)
    end = read_in_cache(cached, count, ATTENTION.has_recent)
    first, last, used = split_range(
        cached, end, split, SPLITS, SPLIT.positions, ATTENTION.window, ATTENTION.is_chunked
    )
    used = tl.minimum(used + 1, SPLITS)
    part, tokens = (head, split, first, last, used), (first_token, count, cached)
    if ends_early(SPLIT.splits):
        if split < used:
            _attend_and_combine(
                qkv, rows, stride, cache, own, rope, scale, cap, results, (out, flat, sinks), part, tokens,
                ATTENTION, SPLIT, (OUT, DIRECT), DEPENDENT,
            )  # fmt: skip
    else:
        _attend_and_combine(
            qkv, rows, stride, cache, own, rope, scale, cap, results, (out, flat, sinks), part, tokens,
            ATTENTION, SPLIT, (OUT, DIRECT), DEPENDENT,
        )  # fmt: skip


@triton.jit
def _attend_and_combine(
    qkv, rows, stride, cache, own, rope, scale, cap, results, output, part, tokens, ATTENTION: tl.constexpr,
    SPLIT: tl.constexpr, OUTPUT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Attention to a KV split; the last program of a KV head and its tokens adds up the splits.

    `rows`, `own`: rows and words of its sequence; `output`: activations, floats and sinks; the others as of
    `_attend_split`.
    """
    SPLITS: tl.constexpr = SPLIT.splits
    head, used = part[0], part[4]
    first_token, count, cached = tokens
    tile, pages = tl.program_id(2), cache.pages
    if SPLIT.is_batch:
        pages += tile * cache.page_stride
    first_result = tile if SPLIT.is_batch else first_token
    _attend_split(
        rows, stride, cache, pages, own, rope, scale, cap, results, part,
        (first_token, first_result, count, cached), ATTENTION, SPLIT, DEPENDENT,
    )  # fmt: skip
    if SPLIT.combines:
        tl.debug_barrier()
        arrived = results.arrived + tile * ATTENTION.kv_heads + head
        programs = used if ends_early(SPLIT.splits) else SPLITS
        if tl.atomic_add(arrived, 1, sem="acq_rel") == programs - 1:
            tl.store(arrived, 0)
            ROWS: tl.constexpr = padded_group(ATTENTION.group)
            # Splits whose partial results are loaded together; more would not fit into registers.
            AT_ONCE: tl.constexpr = SPLITS if SPLITS * ROWS <= 64 else 64 // ROWS if ROWS < 16 else 4
            combine_splits(
                results, output[0], output[1], output[2], qkv, stride, first_result, head, 0, used, ATTENTION,
                SPLIT, OUTPUT[0], OUTPUT[1], ROWS, AT_ONCE,
            )  # fmt: skip


@triton.jit
def _attend_split(
    qkv, stride, cache, pages, state, rope, scale, cap, results, part, tokens, ATTENTION: tl.constexpr,
    SPLIT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Attention of a program's queries to a KV split, whose results it stores.

    `part`: KV head, KV split, its first position and that after its last, and the number of KV splits;
    `tokens`: the first one, its index among those of all sequences, the number of new tokens that they may
    attend to, and of cached positions.
    """
    head, split, first, last, used = part
    first_token, first_result, count, cached = tokens
    GROUP: tl.constexpr = ATTENTION.group
    DIMENSIONS: tl.constexpr = ATTENTION.value_dimensions
    TOKENS: tl.constexpr = SPLIT.tokens
    QUERIES: tl.constexpr = SPLIT.queries
    row = tl.arange(0, QUERIES)
    token = first_token + row // GROUP
    is_query = (row < GROUP * SPLIT.query_tokens) & (token < TOKENS)
    position = tl.load(state + POSITIONS_AT + token, mask=is_query, other=0)
    if ends_early(SPLIT.splits):
        _prefetch(cache, pages, head, first, last, position, rope, ATTENTION, SPLIT)
    wait_for_producers(DEPENDENT)
    queries = _step_queries(
        qkv, stride, state, rope, head, token, row % GROUP, is_query, position, count, ATTENTION, TOKENS
    )
    slopes = head_slopes(rope.slopes, head * GROUP + row % GROUP, ATTENTION.has_alibi)
    highest = tl.zeros((QUERIES,), tl.float32) + MASKED_SCORE
    total = tl.zeros((QUERIES,), tl.float32)
    attn_out = tl.zeros((QUERIES, DIMENSIONS), tl.float32)
    if split == used - 1:
        new = append_new(
            qkv, stride, cache, pages, head, cached, count, state + POSITIONS_AT, rope, ATTENTION, TOKENS
        )
        visible, distance = new_positions(state, token, is_query, position, TOKENS, ATTENTION)
        highest, total, attn_out = _attend_new(
            queries, new, visible, distance, cache, pages, head, position, slopes, cached, highest, total,
            attn_out, scale, cap, ATTENTION,
        )  # fmt: skip
    highest, total, attn_out = _attend_cached(
        queries, cache, pages, head, row, position, slopes, first, last, highest, total, attn_out, scale, cap,
        ATTENTION, SPLIT,
    )  # fmt: skip
    result = first_result + row // GROUP
    part = parts_of(result, head, row % GROUP, ATTENTION, SPLIT) + split * padded_group(GROUP)
    stored = is_query if ends_early(SPLIT.splits) else is_query & (split < used)
    _store_part(results, part, stored, highest, total, attn_out, DIMENSIONS)


@triton.jit
def _store_part(results, part, stored, highest, total, attn_out, DIMENSIONS: tl.constexpr):
    """Write the partial results `part` (n,) of a KV split, where `stored`."""
    pointers = results.parts + part[:, None] * DIMENSIONS + tl.arange(0, DIMENSIONS)[None, :]
    tl.store(pointers, attn_out, mask=stored[:, None])
    tl.store(results.peaks + part * 2, highest, mask=stored)
    tl.store(results.peaks + part * 2 + 1, total, mask=stored)
