"""Matrix instructions of a warp; interpreted, plain operations that give the same."""

import triton
import triton.language as tl

from edgeinfer_kernels.cuda.words import INTERPRETED


@triton.jit
def _by_lanes(words, FIRST: tl.constexpr):
    """(warps, 8, 1, 4) for a matrix's rows, or (warps, 1, 8, 4) for its tokens, of a word a lane."""
    WARPS: tl.constexpr = words.shape[0] // 32
    if FIRST:
        return tl.reshape(words, (WARPS, 8, 1, 4))
    else:
        return tl.reshape(words, (WARPS, 1, 8, 4))


@triton.jit
def _products(left, right, IS_SIGNED: tl.constexpr):
    """Interpreted: Σ of the bytes of `left` times those of `right` over the lanes that share a row."""
    a, b = _by_lanes(left, True), _by_lanes(right, False)
    total = tl.zeros((left.shape[0] // 32, 8, 8), tl.int32)
    for byte in tl.static_range(4):
        code = (a << (24 - 8 * byte)) >> 24
        if not IS_SIGNED:
            code = code & 255
        total += tl.sum(code * ((b << (24 - 8 * byte)) >> 24), axis=3)
    return tl.split(tl.reshape(total, (left.shape[0], 2)))


@triton.jit
def multiply_bytes(upper, lower, right, IS_SIGNED: tl.constexpr):
    """Σ over sixteen weights of codes · int8, four int32 a lane: rows g and g + 8, tokens 2t and 2t + 1.

    `upper`, `lower`: four codes of rows g and g + 8, int8 or uint8; `right`: as many values of token g.
    """
    if INTERPRETED:
        a, b = _products(upper, right, IS_SIGNED)
        c, d = _products(lower, right, IS_SIGNED)
        return a, b, c, d
    else:
        if IS_SIGNED:
            TEXT: tl.constexpr = (
                "{ .reg .b32 z; mov.b32 z, 0; mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 "
                "{$0, $1, $2, $3}, {$4, $5}, {$6}, {z, z, z, z}; }"
            )
        else:
            TEXT: tl.constexpr = (
                "{ .reg .b32 z; mov.b32 z, 0; mma.sync.aligned.m16n8k16.row.col.s32.u8.s8.s32 "
                "{$0, $1, $2, $3}, {$4, $5}, {$6}, {z, z, z, z}; }"
            )
        return tl.inline_asm_elementwise(
            TEXT,
            "=r,=r,=r,=r,r,r,r",
            [upper, lower, right],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )


@triton.jit
def _float_products(left, right):
    """Interpreted: Σ of `left` times `right` over the lanes that share a row."""
    total = tl.sum(_by_lanes(left, True) * _by_lanes(right, False), axis=3)
    return tl.split(tl.reshape(total, (left.shape[0], 2)))


@triton.jit
def multiply_floats(sums, upper0, upper1, lower0, lower1, right0, right1):
    """`sums`, four float32 a lane as of `multiply_bytes`, with two weights a lane and row added.

    Weights and values are rounded to the ten bits of tf32, which hold a float16 and a bfloat16.
    """
    if INTERPRETED:
        a, b = _float_products(upper0, right0)
        c, d = _float_products(upper1, right1)
        e, f = _float_products(lower0, right0)
        g, h = _float_products(lower1, right1)
        return sums[0] + a + c, sums[1] + b + d, sums[2] + e + g, sums[3] + f + h
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .b32 p, q; cvt.rna.tf32.f32 p, $12; cvt.rna.tf32.f32 q, $13; "
            "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 "
            "{$0, $1, $2, $3}, {$8, $9, $10, $11}, {p, q}, {$4, $5, $6, $7}; }",
            "=f,=f,=f,=f,f,f,f,f,r,r,r,r,f,f",
            [
                sums[0],
                sums[1],
                sums[2],
                sums[3],
                upper0.to(tl.int32, bitcast=True),
                lower0.to(tl.int32, bitcast=True),
                upper1.to(tl.int32, bitcast=True),
                lower1.to(tl.int32, bitcast=True),
                right0,
                right1,
            ],
            dtype=(tl.float32, tl.float32, tl.float32, tl.float32),
            is_pure=True,
            pack=1,
        )
