"""From projected rows to the queries, keys and values of a prompt: biases, q/k norm, RoPE, write to the
cache.
"""

import torch
import triton
import triton.language as tl

from edgeinfer_kernels.blocks.attention import AttentionSpec
from edgeinfer_kernels.cuda.prefill.prefill_rows import LAYER, NO_NORM, NORMS
from edgeinfer_kernels.cuda.triton_ops.cache_tiles import CACHES, Q4_0, hadamard_of_halves, store_cache_rows
from edgeinfer_kernels.cuda.tuning.step_shapes import next_power_of_two


@triton.jit
def _rotated(
    projected, row_scale, bias, weight, epsilon, cosine, sine,
    HEADS: tl.constexpr, HEADS_2: tl.constexpr, HEAD_DIM: tl.constexpr, DIMENSIONS: tl.constexpr,
    NORM: tl.constexpr, ROW: tl.constexpr, BIAS: tl.constexpr,
):  # fmt: skip
    """Heads (HEADS_2, DIMENSIONS) of one token, after norm and RoPE; 0 beyond HEADS and HEAD_DIM.

    Each element is loaded together with its RoPE partner, half a head away, so heads are not split.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    head = tl.arange(0, HEADS_2)[:, None]
    dimension = tl.arange(0, DIMENSIONS)[None, :]
    mask = (head < HEADS) & (dimension < HEAD_DIM)
    partner = tl.where(dimension < HALF, dimension + HALF, dimension - HALF)
    own_at, partner_at = head * HEAD_DIM + dimension, head * HEAD_DIM + partner
    own = tl.load(projected + own_at, mask=mask, other=0.0).to(tl.float32) * row_scale
    other = tl.load(projected + partner_at, mask=mask, other=0.0).to(tl.float32) * row_scale
    if BIAS:
        own += tl.load(bias + own_at, mask=mask, other=0.0)
        other += tl.load(bias + partner_at, mask=mask, other=0.0)
    if NORM != NO_NORM:
        COUNT: tl.constexpr = HEADS * HEAD_DIM if ROW else HEAD_DIM
        if NORM == LAYER:
            mean = tl.sum(own, axis=1)[:, None] / COUNT
            if ROW:
                mean = tl.sum(mean, axis=0)[None, :]
            own = tl.where(mask, own - mean, 0.0)
            other = tl.where(mask, other - mean, 0.0)
        square = tl.sum(own * own, axis=1)[:, None] / COUNT
        if ROW:
            square = tl.sum(square, axis=0)[None, :]
        root = tl.sqrt(square + epsilon)
        if ROW:
            own = own / root * tl.load(weight + own_at, mask=mask, other=0.0)
            other = other / root * tl.load(weight + partner_at, mask=mask, other=0.0)
        else:
            own = own / root * tl.load(weight + dimension, mask=dimension < HEAD_DIM, other=0.0)
            other = other / root * tl.load(weight + partner, mask=dimension < HEAD_DIM, other=0.0)
    return own * cosine[None, :] + other * sine[None, :]


@triton.jit
def _as_it_is(projected, row_scale, bias, HEADS: tl.constexpr, HEADS_2: tl.constexpr, HEAD_DIM: tl.constexpr,
              DIMENSIONS: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    head, dimension = tl.arange(0, HEADS_2)[:, None], tl.arange(0, DIMENSIONS)[None, :]
    mask = (head < HEADS) & (dimension < HEAD_DIM)
    values = tl.load(projected + head * HEAD_DIM + dimension, mask=mask, other=0.0).to(tl.float32) * row_scale
    if BIAS:
        values += tl.load(bias + head * HEAD_DIM + dimension, mask=mask, other=0.0)
    return values


@triton.jit(do_not_specialize=["start"])
def rope_append_kernel(
    qkv,
    row_scales,
    bias,
    q_norm,
    k_norm,
    table,
    queries,
    keys,
    key_scales,
    values,
    value_scales,
    start,
    positions,
    epsilon,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HEADS_2: tl.constexpr,
    KV_HEADS_2: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    DIMENSIONS: tl.constexpr,
    NORM: tl.constexpr,
    ROW: tl.constexpr,
    BIAS: tl.constexpr,
    CACHE: tl.constexpr,
):
    """One token: q, k normed, (a, b) -> (a cos - b sin, a sin + b cos), b half a head after a; k, v appended.

    Reads (HEADS + 2 KV_HEADS) · HEAD_DIM · 4 bytes (q and k twice, the second time from cache), writes half.
    """
    token = tl.program_id(0)
    position = start + token
    HALF: tl.constexpr = HEAD_DIM // 2
    dimension = tl.arange(0, DIMENSIONS)
    within = dimension < HEAD_DIM
    pair = tl.where(dimension < HALF, dimension, dimension - HALF)
    turn = table + position.to(tl.int64) * HEAD_DIM + pair
    cosine = tl.load(turn, mask=within, other=0.0)
    sine = tl.load(turn + HALF, mask=within, other=0.0)
    sine = tl.where(dimension < HALF, -sine, sine)
    row = qkv + token.to(tl.int64) * ((HEADS + 2 * KV_HEADS) * HEAD_DIM)
    scale = tl.load(row_scales + token)
    q = _rotated(row, scale, bias, q_norm, epsilon, cosine, sine,
                 HEADS, HEADS_2, HEAD_DIM, DIMENSIONS, NORM, ROW, BIAS)  # fmt: skip
    if CACHE == Q4_0:
        q = hadamard_of_halves(q, HEAD_DIM).to(tl.float32)
    head = tl.arange(0, HEADS_2)[:, None]
    to = queries + (token.to(tl.int64) * HEADS + head) * HEAD_DIM + dimension[None, :]
    q = tl.minimum(tl.maximum(q, -65504.0), 65504.0).to(tl.float16)
    tl.store(to, q, mask=(head < HEADS) & within[None, :])
    k_at, v_at = HEADS * HEAD_DIM, (HEADS + KV_HEADS) * HEAD_DIM
    k = _rotated(row + k_at, scale, bias + k_at if BIAS else bias, k_norm, epsilon, cosine, sine,
                 KV_HEADS, KV_HEADS_2, HEAD_DIM, DIMENSIONS, NORM, ROW, BIAS)  # fmt: skip
    v = _as_it_is(row + v_at, scale, bias + v_at if BIAS else bias,
                  KV_HEADS, KV_HEADS_2, HEAD_DIM, DIMENSIONS, BIAS)  # fmt: skip
    kv_head = tl.arange(0, KV_HEADS_2)
    rows = kv_head.to(tl.int64) * positions + position
    rows_mask = kv_head < KV_HEADS
    store_cache_rows(keys, key_scales, rows, rows_mask, k, HEAD_DIM, DIMENSIONS, CACHE)
    store_cache_rows(values, value_scales, rows, rows_mask, v, HEAD_DIM, DIMENSIONS, CACHE)


def rope_append(
    qkv: torch.Tensor,
    row_scales: torch.Tensor,
    bias: torch.Tensor | None,
    q_norm: torch.Tensor | None,
    k_norm: torch.Tensor | None,
    table: torch.Tensor,
    facts: AttentionSpec,
    start: int,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    key_scales: torch.Tensor | None = None,
    value_scales: torch.Tensor | None = None,
) -> None:
    """Queries (tokens, heads, head_dim) float16 from the projection qkv; keys and values are written to the
    cache at start….

    qkv (tokens, (heads + 2 kv_heads) · head_dim) is multiplied by row_scales (tokens,) first; `bias` is for
    the whole row. Pairs are (i, i + head_dim/2); `table` (positions, head_dim) float32: cosines, then sines.
    q_norm and k_norm: weights of a head or of the row, by `facts.qk_norm`. Scales: of a q8_0 or q4_0 cache;
    for q4_0, queries are multiplied with the Hadamard matrix like the keys.
    """
    tokens = qkv.shape[0]
    normed = facts.qk_norm != "none" and q_norm is not None
    elements = next_power_of_two(facts.heads) * next_power_of_two(facts.head_dim)
    rope_append_kernel[(tokens,)](
        qkv, row_scales, bias, q_norm, k_norm, table, queries, keys, key_scales, values, value_scales,
        start, keys.shape[1], facts.norm.epsilon,
        HEADS=facts.heads, KV_HEADS=facts.kv_heads, HEADS_2=next_power_of_two(facts.heads),
        KV_HEADS_2=next_power_of_two(facts.kv_heads), HEAD_DIM=facts.head_dim,
        DIMENSIONS=next_power_of_two(facts.head_dim),
        NORM=NORMS[facts.norm.kind] if normed else NO_NORM, ROW=facts.qk_norm == "row",
        BIAS=bias is not None, CACHE=CACHES[keys.dtype],
        num_warps=min(16, max(1, elements // 1024)),
    )  # fmt: skip
