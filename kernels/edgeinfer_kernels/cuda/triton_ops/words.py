"""Operations on words of quantized rows: codes as bytes, dot products of bytes, and 16-bit parts of words."""

import triton
import triton.language as tl

from edgeinfer_kernels.cuda.compile_target import AMD_DOT, USES_PTX
from edgeinfer_kernels.cuda.weights.plane_formats import CODEBOOKS

# `plane_formats.Code` and `Scale` as constants for kernels.
NIBBLE = tl.constexpr(0)
NIBBLE_1 = tl.constexpr(1)
NIBBLE_2 = tl.constexpr(2)
BYTE = tl.constexpr(3)
CODEBOOK = tl.constexpr(4)
HALF = tl.constexpr(5)
BRAIN = tl.constexpr(6)
SINGLE = tl.constexpr(7)
NO_SCALE = tl.constexpr(0)
FLOAT16 = tl.constexpr(1)
BFLOAT16 = tl.constexpr(2)
PAIR = tl.constexpr(3)
MINIMUM = tl.constexpr(4)
SIGNED = tl.constexpr(5)
SHORT = tl.constexpr(6)
E4M3 = tl.constexpr(7)


def level_words(levels: tuple[int, ...]) -> tuple[int, ...]:
    """Sixteen int8 levels as four words, int32."""
    raw = bytes(level & 255 for level in levels)
    return tuple(int.from_bytes(raw[at : at + 4], "little", signed=True) for at in range(0, 16, 4))


CODEBOOK_WORDS = tl.constexpr(tuple(level_words(levels) for levels in CODEBOOKS))
"""The codebooks, as four words each."""
IQ4_WORDS, FP4_WORDS = (tl.constexpr(level_words(levels)) for levels in CODEBOOKS[:2])
"""Those of IQ4 and of FP4 (twice its values)."""


@triton.jit
def _instruction(ASSEMBLY: tl.constexpr, first, second, third):
    """One PTX instruction with three word operands."""
    return tl.inline_asm_elementwise(
        ASSEMBLY, "=r,r,r,r", [first, second, third], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _amd_dot(weights, activations, sums):
    """sums + Σ of four int8 · int8, on AMD's GPUs."""
    return tl.inline_asm_elementwise(
        AMD_DOT, "=v,v,v,v", [weights, activations, sums], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def dot_unsigned(weights, activations, sums):
    """sums + Σ of four uint8 · int8; the weights are below 128."""
    if AMD_DOT != "":
        return _amd_dot(weights, activations, sums)
    elif not USES_PTX:
        for byte in tl.static_range(4):
            left = (weights >> (8 * byte)) & 0xFF
            sums = sums + left * ((activations << (24 - 8 * byte)) >> 24)
        return sums
    else:
        return _instruction("dp4a.u32.s32 $0, $1, $2, $3;", weights, activations, sums)


@triton.jit
def dot_signed(weights, activations, sums):
    """sums + Σ of four int8 · int8."""
    if AMD_DOT != "":
        return _amd_dot(weights, activations, sums)
    elif not USES_PTX:
        for byte in tl.static_range(4):
            left = (weights << (24 - 8 * byte)) >> 24
            sums = sums + left * ((activations << (24 - 8 * byte)) >> 24)
        return sums
    else:
        return _instruction("dp4a.s32.s32 $0, $1, $2, $3;", weights, activations, sums)


@triton.jit
def select_bytes(low, high, selector):
    """Byte k of the result is the byte of low (0…3) or high (4…7) selected by nibble k of the selector."""
    if not USES_PTX:
        selected = tl.zeros_like(selector)
        for byte in tl.static_range(4):
            index = (selector >> (4 * byte)) & 7
            word = tl.where(index < 4, low, high)
            selected = selected | (((word >> (8 * (index & 3))) & 0xFF) << (8 * byte))
        return selected
    else:
        return _instruction("prmt.b32 $0, $1, $2, $3;", low, high, selector)


@triton.jit
def masked_or(words, MASK: tl.constexpr, BITS: tl.constexpr):
    """(words & MASK) | BITS."""
    if not USES_PTX:
        return (words & MASK) | BITS
    else:
        zero = tl.zeros_like(words)  # Both constants cannot be immediates of one instruction.
        return _instruction("lop3.b32 $0, $1, $2, $3, 0xEA;", words, zero + MASK, zero + BITS)


@triton.jit
def look_up(codes, BOOK: tl.constexpr):
    """Map four 4-bit codes, in the low 16 bits of a word, to the four int8 levels of a codebook."""
    zero = tl.zeros_like(codes)
    WORDS: tl.constexpr = CODEBOOK_WORDS[BOOK]
    a, b, c, d = zero + WORDS[0], zero + WORDS[1], zero + WORDS[2], zero + WORDS[3]
    index = codes & 0x7777
    selector = ((codes & 0x8888) >> 1) | 0x3210
    return select_bytes(select_bytes(a, b, index), select_bytes(c, d, index), selector)


@triton.jit
def quad(words, GROUP: tl.constexpr, TILE: tl.constexpr):
    """The codes of elements 4·GROUP… of every block, as the bytes of a word; unsigned up to NIBBLE_2."""
    PART: tl.constexpr = GROUP % 4
    UPPER: tl.constexpr = GROUP // 4
    if TILE.code == BYTE:
        codes = words[GROUP]
    elif TILE.code == CODEBOOK:
        codes = look_up((words[PART] >> (16 * UPPER)) & 0xFFFF, TILE.codebook)
    else:
        codes = (words[PART] >> (4 * UPPER)) & 0x0F0F0F0F
        if TILE.code == NIBBLE_1:
            if UPPER == 0:
                codes = codes | ((words[4] << (4 - PART)) & 0x10101010)
            else:
                codes = codes | ((words[4] >> PART) & 0x10101010)
        elif TILE.code == NIBBLE_2:
            if PART <= 2:
                codes = codes | ((words[4 + UPPER] << (4 - 2 * PART)) & 0x30303030)
            else:
                codes = codes | ((words[4 + UPPER] >> 2) & 0x30303030)
    return codes


@triton.jit
def unsigned_quad(words, GROUP: tl.constexpr, TILE: tl.constexpr):
    """As `quad`; 128 is added to signed codes."""
    codes = quad(words, GROUP, TILE)
    if TILE.code == BYTE or TILE.code == CODEBOOK:
        codes = codes ^ -0x7F7F7F80  # 0x80 in every byte.
    return codes


@triton.jit
def code_offset(TILE: tl.constexpr):
    """What is subtracted from the codes of `unsigned_quad`."""
    return tl.constexpr(128 if TILE.code == BYTE or TILE.code == CODEBOOK else TILE.offset)


@triton.jit
def code_value(codes, BYTE_INDEX: tl.constexpr, OFFSET: tl.constexpr):
    """One of four codes minus the offset, float32.

    A code in the low bits of the float32 2²³ is added to it; this is faster than a conversion.
    """
    if not USES_PTX:
        return (((codes >> (8 * BYTE_INDEX)) & 255) - OFFSET).to(tl.float32)
    else:
        POWER: tl.constexpr = 0x4B000000
        SELECTED: tl.constexpr = 0x7540 + BYTE_INDEX
        shifted = _instruction("prmt.b32 $0, $1, $2, $3;", codes, POWER, SELECTED)
        return shifted.to(tl.float32, bitcast=True) - (8388608.0 + OFFSET)


@triton.jit
def twice(word):
    """The low 16 bits of a word in both of its 16-bit parts."""
    if not USES_PTX:
        return (word & 0xFFFF) | (word << 16)
    else:
        return _instruction("prmt.b32 $0, $1, $2, $3;", word, word, word * 0 + 0x1010)


@triton.jit
def f16_twice(value):
    """A float32 as float16, in both 16-bit parts of a word."""
    return twice(value.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32))


@triton.jit
def scaled_codes(codes, factor, OFFSET: tl.constexpr):
    """Four codes minus the offset, times a float16, rounded to float16. `factor` has it twice.

    Two at a time, as in `code_value` with 2¹⁰.
    """
    if not USES_PTX:
        scale = low_f16(factor)
        return (
            (scale * code_value(codes, 0, OFFSET)).to(tl.float16),
            (scale * code_value(codes, 1, OFFSET)).to(tl.float16),
            (scale * code_value(codes, 2, OFFSET)).to(tl.float16),
            (scale * code_value(codes, 3, OFFSET)).to(tl.float16),
        )
    else:
        POWERS: tl.constexpr = 0x64006400 + 0x00010001 * OFFSET
        first, second = tl.inline_asm_elementwise(
            """{
            prmt.b32 $0, $2, 0x64646464, 0x4140;
            prmt.b32 $1, $2, 0x64646464, 0x4342;
            sub.f16x2 $0, $0, $4;
            sub.f16x2 $1, $1, $4;
            mul.f16x2 $0, $0, $3;
            mul.f16x2 $1, $1, $3;
            }""",
            "=&r,=&r,r,r,r",
            [codes, factor, POWERS],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
        return _halves(first) + _halves(second)


@triton.jit
def _interpreted_codes(codes, factor, summand, OFFSET: tl.constexpr):
    """`paired_codes` without inline assembly."""
    scale, plus = low_f16(factor), 0.0
    if summand is not None:
        plus = low_f16(summand)
    return (
        (scale * code_value(codes, 0, OFFSET) + plus).to(tl.float16),
        (scale * code_value(codes, 1, OFFSET) + plus).to(tl.float16),
        (scale * code_value(codes, 2, OFFSET) + plus).to(tl.float16),
        (scale * code_value(codes, 3, OFFSET) + plus).to(tl.float16),
    )


@triton.jit
def paired_codes(codes, factor, summand, OFFSET: tl.constexpr):
    """Four codes minus the offset, times a float16, plus another one unless that is None; rounded once to
    float16. `factor` and `summand` have theirs twice. Codes 0 and 2 share a register, and 1 and 3.

    As in `code_value` with 2¹⁰.
    """
    if not USES_PTX:
        return _interpreted_codes(codes, factor, summand, OFFSET)
    else:
        even = _instruction("prmt.b32 $0, $1, $2, $3;", codes, 0x64646464, 0x4240)
        odd = _instruction("prmt.b32 $0, $1, $2, $3;", codes, 0x64646464, 0x4341)
        minus = -0x1BFF1C00 + 0x00010001 * OFFSET
        return _scaled(even, odd, factor, summand, 0x3C003C00, minus)


@triton.jit
def paired_nibbles(word, factor, summand, UPPER: tl.constexpr, OFFSET: tl.constexpr):
    """`paired_codes` of the low or the high nibbles of a word.

    In the float16 2¹⁰ a high nibble counts sixteen times, so a sixteenth of it is 2⁶ plus the code.
    """
    if not USES_PTX:
        return _interpreted_codes((word >> (4 * UPPER)) & 0x0F0F0F0F, factor, summand, OFFSET)
    elif UPPER:
        even, odd = masked_or(word, 0x00F000F0, 0x64006400), masked_or(word >> 8, 0x00F000F0, 0x64006400)
        minus = -0x2BFF2C00 + 0x00100010 * OFFSET
        return _scaled(even, odd, factor, summand, 0x2C002C00, minus)
    else:
        even, odd = masked_or(word, 0x000F000F, 0x64006400), masked_or(word >> 8, 0x000F000F, 0x64006400)
        minus = -0x1BFF1C00 + 0x00010001 * OFFSET
        return _scaled(even, odd, factor, summand, 0x3C003C00, minus)


@triton.jit
def _scaled(even, odd, factor, summand, part, minus):
    """(codes · PART + MINUS) · factor + summand: elements 0 to 3 from words of 0 and 2, and of 1 and 3. MINUS
    is negative.
    """
    if summand is None:
        even, odd = tl.inline_asm_elementwise(
            """{
            fma.rn.f16x2 $0, $2, $5, $6;
            fma.rn.f16x2 $1, $3, $5, $6;
            mul.f16x2 $0, $0, $4;
            mul.f16x2 $1, $1, $4;
            }""",
            "=&r,=&r,r,r,r,r,r",
            [even, odd, factor, part, minus],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    else:
        even, odd = tl.inline_asm_elementwise(
            """{
            fma.rn.f16x2 $0, $2, $6, $7;
            fma.rn.f16x2 $1, $3, $6, $7;
            fma.rn.f16x2 $0, $0, $4, $5;
            fma.rn.f16x2 $1, $1, $4, $5;
            }""",
            "=&r,=&r,r,r,r,r,r,r",
            [even, odd, factor, summand, part, minus],
            dtype=(tl.int32, tl.int32),
            is_pure=True,
            pack=1,
        )
    first, second = _halves(even), _halves(odd)
    return first[0], second[0], first[1], second[1]


@triton.jit
def _halves(word):
    """The two float16 of a word."""
    return (
        word.to(tl.int16).to(tl.float16, bitcast=True),
        (word >> 16).to(tl.int16).to(tl.float16, bitcast=True),
    )


@triton.jit
def low_f16(word):
    """The float16 in the low 16 bits of a word."""
    return word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def half_of_e4m3(word, byte):
    """Half of the E4M3 number, without a sign, in a byte of a word, float32.

    Its bits are those of a float16 that is smaller by 2⁸.
    """
    return low_f16(((word >> (8 * byte)) & 127) << 7) * 128.0


@triton.jit
def high_f16(word):
    """The float16 in the high 16 bits of a word."""
    return (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
