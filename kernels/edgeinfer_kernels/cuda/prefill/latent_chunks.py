"""Latent attention of a chunk of a prompt over the cache; see `latent_kernels.py`."""

import triton
import triton.language as tl

from edgeinfer_kernels.cuda.blocks.common.attention_splits import MASKED_SCORE
from edgeinfer_kernels.cuda.decode.decode_attention import add_scores
from edgeinfer_kernels.cuda.decode.latent_kernels import (
    latent_scores,
    load_latents,
    load_recent_latents,
    load_rows,
)
from edgeinfer_kernels.cuda.triton_ops.step_words import recent_from, step_start


@triton.jit
def _attend_chunk(
    query, tail, own, best, total, attn_out, first, last, cache, scale,
    LATENT: tl.constexpr, POSITIONS: tl.constexpr, MASKED: tl.constexpr, RECENT: tl.constexpr,
):  # fmt: skip
    """Add positions first… up to (not including) `last`; MASKED: some rows do not attend to all of them;
    RECENT: as recent positions.
    """
    for begin in range(first, last, POSITIONS):
        seen = begin + tl.arange(0, POSITIONS)
        within = seen < last
        if RECENT:
            latents, tails = load_recent_latents(cache, cache.pages, seen, within, LATENT)
        else:
            latents, tails = load_latents(cache, cache.pages, seen, within, LATENT)
        scores = latent_scores(query, tail, latents, tails) * scale
        visible = within[None, :] & (own >= 0)[:, None]
        if MASKED:
            visible = visible & (seen[None, :] <= own[:, None])
            if RECENT:
                visible = visible & (seen[None, :] >= recent_from(own)[:, None])
            elif LATENT.has_recent:
                visible = visible & (seen[None, :] < recent_from(own)[:, None])
        best, total, attn_out = add_scores(scores, latents, visible, best, total, attn_out)
    return best, total, attn_out


@triton.jit(do_not_specialize=["tokens"])
def latent_chunk_kernel(
    queries, ropes, cache, words, tokens, scale,
    LATENT: tl.constexpr, ROWS: tl.constexpr, POSITIONS: tl.constexpr,
):  # fmt: skip
    """softmax(scale · q · k) · v of some tokens, for ROWS queries of tokens and heads; in place.

    queries (tokens, heads, latent_dim) and ropes (tokens, heads, rope_dim) float16; the latent vectors of the
    results replace the queries. The last rows, which attend to the most positions, are scheduled first. Reads
    the visible positions once per program, mostly from cache.
    """
    HEADS: tl.constexpr = LATENT.heads
    LATENT_DIM: tl.constexpr = LATENT.latent_dim
    DIMENSIONS: tl.constexpr = LATENT.dimensions
    first_row = (tl.num_programs(0) - 1 - tl.program_id(0)) * ROWS
    row = first_row + tl.arange(0, ROWS)
    mask = row < tokens * HEADS
    start = step_start(words)
    own = start + row // HEADS
    query = load_rows(queries, row, mask, LATENT_DIM, DIMENSIONS)
    tail = load_rows(ropes, row, mask, LATENT.rope_dim, LATENT.ropes)
    best = tl.zeros((ROWS,), tl.float32) + MASKED_SCORE
    total = tl.zeros((ROWS,), tl.float32)
    attn_out = tl.zeros((ROWS, DIMENSIONS), tl.float32)
    lowest = start + first_row // HEADS
    highest = start + tl.minimum((first_row + ROWS - 1) // HEADS + 1, tokens)
    if LATENT.has_recent:
        near = recent_from(lowest)
        best, total, attn_out = _attend_chunk(
            query, tail, own, best, total, attn_out, near, highest, cache, scale, LATENT, POSITIONS, True,
            True,
        )  # fmt: skip
        # Positions before these are read in the cache, by all rows up to `lowest`, by some up to `highest`.
        lowest, highest = near - 1, recent_from(highest - 1)
    open_to = (lowest + 1) // POSITIONS * POSITIONS
    best, total, attn_out = _attend_chunk(
        query, tail, own, best, total, attn_out, 0, open_to, cache, scale, LATENT, POSITIONS, False, False
    )
    best, total, attn_out = _attend_chunk(
        query, tail, own, best, total, attn_out, open_to, highest, cache, scale, LATENT, POSITIONS, True,
        False,
    )  # fmt: skip
    attn_out = attn_out / tl.where(total > 0, total, 1.0)[:, None]
    dimension = tl.arange(0, DIMENSIONS)
    at = queries + row.to(tl.int64)[:, None] * LATENT_DIM + dimension[None, :]
    stored = mask[:, None] & (dimension < LATENT_DIM)[None, :]
    tl.store(at, attn_out.to(tl.float16), mask=stored)
