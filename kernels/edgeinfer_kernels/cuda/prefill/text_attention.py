"""Attention within whole texts: every token of an encoder's text attends to all of it."""

from dataclasses import dataclass
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from edgeinfer_kernels.blocks.encoder_attention import EncoderAttentionSpec
from edgeinfer_kernels.cuda.prefill.flash_attention import LOG2_E
from edgeinfer_kernels.cuda.tuning.step_shapes import next_power_of_two

TILE_ROWS = 64
"""Queries of a program: all heads of a group for some tokens of one text."""
TILE_ELEMENTS = 8192
"""Elements of a tile of keys."""


class TextConfig(NamedTuple):
    """The heads; rows, tokens: those of a tile; positions: those of a tile of keys; half_window: the largest
    distance of a token that is attended to, 0: no limit.
    """

    heads: int
    group: int
    head_dim: int
    dimensions: int
    rows: int
    tokens: int
    positions: int
    half_window: int
    has_slopes: bool


@dataclass(frozen=True)
class ProjectedTexts:
    """The projections of texts in float16: queries (tokens, heads, head_dim); keys and values (kv_heads,
    positions, head_dim).
    """

    queries: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor


@triton.jit
def text_attention_kernel(queries, keys, values, out, tiles, slopes, capacity, scale, TEXT: tl.constexpr):
    """A tile of tokens of one text, for one key head; `tiles` has its first token, and the first token of its
    text and the one after it. softmax(scale · q kᵀ - slope · distance) v.

    Reads the keys and values of the text, mostly from cache, once for each tile; writes as much as it reads
    of the queries.
    """
    GROUP: tl.constexpr = TEXT.group
    HEAD_DIM: tl.constexpr = TEXT.head_dim
    DIMENSIONS: tl.constexpr = TEXT.dimensions
    ROWS: tl.constexpr = TEXT.rows
    BLOCK_N: tl.constexpr = TEXT.positions
    TOKENS: tl.constexpr = TEXT.tokens
    WINDOW: tl.constexpr = TEXT.half_window
    tile, head = tiles + tl.program_id(0) * 3, tl.program_id(1)
    first, begin, end = tl.load(tile), tl.load(tile + 1), tl.load(tile + 2)
    row = tl.arange(0, ROWS)
    token = first + row // GROUP
    rows_mask = (row < TOKENS * GROUP) & (token < end)
    dimension = tl.arange(0, DIMENSIONS)
    query_head = head * GROUP + row % GROUP
    at = (token.to(tl.int64) * TEXT.heads + query_head)[:, None] * HEAD_DIM + dimension[None, :]
    mask = rows_mask[:, None] & (dimension < HEAD_DIM)[None, :]
    q = tl.load(queries + at, mask=mask, other=0.0)
    slope = tl.zeros((ROWS,), tl.float32)
    if TEXT.has_slopes:
        slope = tl.load(slopes + query_head) * LOG2_E
    if WINDOW:
        begin = tl.maximum(begin, first - WINDOW)
        end = tl.minimum(end, first + TOKENS + WINDOW)
    best = tl.full((ROWS,), float("-inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    result = tl.zeros((ROWS, DIMENSIONS), tl.float32)
    for start in range(begin, end, BLOCK_N):
        seen = start + tl.arange(0, BLOCK_N)
        within = (seen < end)[:, None] & (dimension < HEAD_DIM)[None, :]
        key_at = (head.to(tl.int64) * capacity + seen)[:, None] * HEAD_DIM + dimension[None, :]
        k = tl.load(keys + key_at, mask=within, other=0.0)
        scores = tl.dot(q, tl.trans(k)) * (scale * LOG2_E)
        distance = tl.abs(seen[None, :] - token[:, None])
        if TEXT.has_slopes:
            scores -= slope[:, None] * distance.to(tl.float32)
        visible = (seen < end)[None, :]
        if WINDOW:
            visible = visible & (distance <= WINDOW)
        scores = tl.where(visible, scores, float("-inf"))
        now = tl.maximum(best, tl.max(scores, axis=1))
        top = tl.where(now == float("-inf"), 0.0, now)  # of a row that has attended to nothing so far
        decay, weights = tl.exp2(best - top), tl.exp2(scores - top[:, None])
        total = total * decay + tl.sum(weights, axis=1)
        v = tl.load(values + key_at, mask=within, other=0.0)
        result = result * decay[:, None] + tl.dot(weights.to(tl.float16), v)
        best = now
    result = result / tl.where(rows_mask, total, 1.0)[:, None]
    tl.store(out + at, result.to(tl.float16), mask=mask)


def tile_tokens(spec: EncoderAttentionSpec) -> int:
    """Tokens of a tile."""
    return TILE_ROWS // (spec.heads // spec.kv_heads)


def text_attention(
    texts: ProjectedTexts,
    tiles: torch.Tensor,
    spec: EncoderAttentionSpec,
    slopes: torch.Tensor | None,
    out: torch.Tensor,
) -> None:
    """out (tokens, heads · head_dim) float16: softmax attention within each text. `tiles` (count, 3) int32:
    see the kernel; slopes (heads,): of ALiBi.
    """
    dimensions = max(16, next_power_of_two(spec.head_dim))
    config = TextConfig(
        spec.heads, spec.heads // spec.kv_heads, spec.head_dim, dimensions, TILE_ROWS, tile_tokens(spec),
        min(64, TILE_ELEMENTS // dimensions), spec.window // 2, slopes is not None,
    )  # fmt: skip
    text_attention_kernel[(len(tiles), spec.kv_heads)](
        texts.queries, texts.keys, texts.values, out, tiles, slopes, texts.keys.shape[1], spec.scale,
        TEXT=config, num_warps=4 if dimensions <= 128 else 8, num_stages=2 if dimensions <= 128 else 1,
    )  # fmt: skip


@triton.jit
def add_position_rows_kernel(x, rows, positions, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """x += the rows of the tokens' positions, 256 elements a program. Reads and writes x once, and as much of
    the rows.
    """
    token, offset = tl.program_id(1).to(tl.int64), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = offset < WIDTH
    row = tl.load(positions + token).to(tl.int64)
    own = x + token * WIDTH + offset
    tl.store(own, tl.load(own, mask=mask) + tl.load(rows + row * WIDTH + offset, mask=mask), mask=mask)


def add_position_rows(x: torch.Tensor, rows: torch.Tensor, positions: torch.Tensor) -> None:
    """x (tokens, width) += rows[positions]; rows: (count · width,) float32."""
    tokens, width = x.shape
    add_position_rows_kernel[(-(-width // 256), tokens)](x, rows, positions, WIDTH=width, BLOCK=256)
