"""The KV splits of a decode step's attention: the layout of their results, and what adds them up."""

import triton
import triton.language as tl

from edgeinfer_kernels.cuda.triton_ops.activations import sigmoid, softplus
from edgeinfer_kernels.cuda.triton_ops.cache_tiles import Q4_0, hadamard_f16
from edgeinfer_kernels.cuda.triton_ops.step_words import CACHED_AT, read_in_cache, split_range
from edgeinfer_kernels.cuda.triton_ops.tiles import quantize, release_consumers, wait_for_producers

LOG2_E = tl.constexpr(1.4426950408889634)
MASKED_SCORE = tl.constexpr(-1e30)
NO_GATE, SIGMOID_GATE, SOFTPLUS_GATE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
"""The function of the gates of the results."""


@triton.constexpr_function
def padded_group(group):
    """Query heads of a KV head, padded."""
    return triton.next_power_of_2(group)


@triton.jit
def parts_of(token, head, member, ATTENTION: tl.constexpr, SPLIT: tl.constexpr):
    """The index of the partial results of a token's query heads `member` of a KV head, of the first split."""
    PADDED: tl.constexpr = padded_group(ATTENTION.group)
    return (token * ATTENTION.kv_heads + head) * (SPLIT.splits * PADDED) + member


@triton.jit
def _add_part(results, part, inside, dimension, peak, total, attn_out, DIMENSIONS: tl.constexpr):
    """`total` (n,) and `attn_out` (n, DIMENSIONS) plus the partial results `part` (n,) of a KV split, where
    `inside`.
    """
    weight = tl.exp2(tl.load(results.peaks + part * 2, mask=inside, other=MASKED_SCORE) - peak)
    total += weight * tl.load(results.peaks + part * 2 + 1, mask=inside, other=0.0)
    pointers = results.parts + part[:, None] * DIMENSIONS + dimension[None, :]
    attn_out += weight[:, None] * tl.load(pointers, mask=inside[:, None], other=0.0)
    return total, attn_out


@triton.jit
def combine_splits_kernel(
    state, results, out, flat, sinks, qkv, stride, ATTENTION: tl.constexpr, SPLIT: tl.constexpr,
    OUT: tl.constexpr, DIRECT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """What the last program of `decode_attention_kernel` does if `combines`, which one program would take
    long for with the queries of several tokens; program (KV head, query head of it, token).

    Reads the results of the KV splits once.
    """
    SPLITS: tl.constexpr = SPLIT.splits
    release_consumers(DEPENDENT)
    cached = tl.load(state + CACHED_AT)
    end = read_in_cache(cached, SPLIT.tokens, ATTENTION.has_recent)
    _, _, used = split_range(cached, end, 0, SPLITS, SPLIT.positions, ATTENTION.window, ATTENTION.is_chunked)
    used = tl.minimum(used + 1, SPLITS)
    AT_ONCE: tl.constexpr = SPLITS if SPLITS < 16 else 16
    wait_for_producers(DEPENDENT)
    combine_splits(
        results, out, flat, sinks, qkv, stride, tl.program_id(2), tl.program_id(0), tl.program_id(1), used,
        ATTENTION, SPLIT, OUT, DIRECT, 1, AT_ONCE,
    )  # fmt: skip


@triton.jit
def _gate_factors(qkv, stride, token, query_head, dimension, taken, ATTENTION: tl.constexpr):
    """The factors of results (rows, DIMENSIONS): the gates of a head follow its query, or, if gate_at isn't
    0, each head has one from there on.
    """
    VALUE_DIM: tl.constexpr = ATTENTION.value_dim
    if ATTENTION.gate_at == 0:
        at = ((2 * query_head + 1) * VALUE_DIM)[:, None] + dimension[None, :]
    else:
        at = (ATTENTION.gate_at + query_head)[:, None] + dimension[None, :] * 0
    inside = taken[:, None] & (dimension < VALUE_DIM)[None, :]
    gate = tl.load(qkv + (token * stride)[:, None] + at, mask=inside, other=0.0)
    if ATTENTION.gate == SOFTPLUS_GATE:
        return softplus(gate)
    else:
        return sigmoid(gate)


@triton.jit
def combine_splits(
    results, out, flat, sinks, qkv, stride, own_token, head, first_member, used, ATTENTION: tl.constexpr,
    SPLIT: tl.constexpr, OUT: tl.constexpr, DIRECT: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Add up the first `used` KV splits of one KV head and token, for ROWS query heads from `first_member`
    on; multiply them by their gates; write activations or floats. AT_ONCE: splits that are loaded together.
    """
    GROUP: tl.constexpr = ATTENTION.group
    PADDED: tl.constexpr = padded_group(GROUP)
    VALUE_DIM: tl.constexpr = ATTENTION.value_dim
    DIMENSIONS: tl.constexpr = ATTENTION.value_dimensions
    SPLITS: tl.constexpr = SPLIT.splits
    CHUNKS: tl.constexpr = DIMENSIONS // 16
    member = first_member + tl.arange(0, ROWS)
    token, query_head = own_token + member * 0, head * GROUP + member
    first = parts_of(own_token, head, member, ATTENTION, SPLIT)
    dimension = tl.arange(0, DIMENSIONS)
    taken = member < GROUP
    peak = tl.zeros((ROWS,), tl.float32) + MASKED_SCORE
    for split in tl.static_range(SPLITS):
        at = first + split * PADDED
        peak = tl.maximum(
            peak, tl.load(results.peaks + at * 2, mask=taken & (split < used), other=MASKED_SCORE)
        )
    if ATTENTION.has_sinks:
        sink = tl.load(sinks + query_head, mask=taken, other=0.0) * LOG2_E
        peak = tl.maximum(peak, sink)
    total = tl.zeros((ROWS,), tl.float32)
    attn_out = tl.zeros((ROWS, DIMENSIONS), tl.float32)
    if SPLITS == AT_ONCE:
        for split in tl.static_range(SPLITS):
            part = first + split * PADDED
            inside = taken & (split < used)
            total, attn_out = _add_part(results, part, inside, dimension, peak, total, attn_out, DIMENSIONS)
    else:
        for start in tl.range(0, used, AT_ONCE, num_stages=1):
            for index in tl.static_range(AT_ONCE):
                part = first + (start + index) * PADDED
                inside = taken & (start + index < used)
                total, attn_out = _add_part(
                    results, part, inside, dimension, peak, total, attn_out, DIMENSIONS
                )
    if ATTENTION.has_sinks:
        total += tl.exp2(sink - peak)
    attn_out = attn_out / tl.where(total > 0, total, 1.0)[:, None]
    if ATTENTION.value_type == Q4_0:
        attn_out = hadamard_f16(attn_out, VALUE_DIM).to(tl.float32)
    if ATTENTION.gate != NO_GATE:
        attn_out *= _gate_factors(qkv, stride, token, query_head, dimension, taken, ATTENTION)
    if DIRECT:
        chunk = tl.arange(0, CHUNKS)[None, :]
        group = query_head[:, None] * (VALUE_DIM // 16) + chunk
        stored = taken[:, None] & (chunk < VALUE_DIM // 16)
        quantize(
            tl.reshape(attn_out, (ROWS * CHUNKS, 16)),
            out,
            tl.reshape(group, (ROWS * CHUNKS,)),
            tl.reshape(stored, (ROWS * CHUNKS,)),
            OUT,
            tl.reshape(token[:, None] + chunk * 0, (ROWS * CHUNKS,)),
        )
    else:
        base = flat + token * (ATTENTION.kv_heads * GROUP * VALUE_DIM) + query_head * VALUE_DIM
        stored = taken[:, None] & (dimension < VALUE_DIM)[None, :]
        tl.store(base[:, None] + dimension[None, :], attn_out, mask=stored)
