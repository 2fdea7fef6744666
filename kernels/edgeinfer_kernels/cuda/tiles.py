"""Pieces of kernels: tiles of quantised rows, their dot products with quantised activations, and back.

*Activations* of one token are planes of 32-bit words in the blocks' order of `plane_formats`, (planes,
blocks): 8 words of int8 (word j: elements 4j… of the block), 2 float32 scales (elements 0…15, 16…31), 2 int32
sums of the int8 values; where a consumer has float weights, 32 planes of the float32 values follow.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
"""Inline assembly can't be interpreted: kernels then compute the same with plain operations."""

INTEGER_PLANES = tl.constexpr(12)
FLOAT_PLANES = tl.constexpr(44)
"""Planes of activations without and with the float values."""

# plane_formats.Code and Scale, as kernels see them
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


@triton.jit
def wait_for_producers(DEPENDENT: tl.constexpr):
    """Let the next kernel start, then wait until what the kernels before have written can be read."""
    if DEPENDENT:
        gdc_wait()


@triton.jit
def release_consumers(DEPENDENT: tl.constexpr):
    """Let the next kernel of the stream start to load what doesn't depend on this one."""
    if DEPENDENT:
        gdc_launch_dependents()


@triton.jit
def dot_unsigned(weights, activations, sums):
    """sums + Σ of four uint8 · int8."""
    if INTERPRETED:
        for byte in tl.static_range(4):
            left = (weights >> (8 * byte)) & 0xFF
            sums = sums + left * ((activations << (24 - 8 * byte)) >> 24)
        return sums
    else:
        return tl.inline_asm_elementwise(
            "dp4a.u32.s32 $0, $1, $2, $3;",
            "=r,r,r,r",
            [weights, activations, sums],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def dot_signed(weights, activations, sums):
    """sums + Σ of four int8 · int8."""
    if INTERPRETED:
        for byte in tl.static_range(4):
            left = (weights << (24 - 8 * byte)) >> 24
            sums = sums + left * ((activations << (24 - 8 * byte)) >> 24)
        return sums
    else:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;",
            "=r,r,r,r",
            [weights, activations, sums],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def _select_bytes(low, high, selector):
    """Byte k of the result is the one of low (0…3) and high (4…7) that the selector's nibble k names."""
    if INTERPRETED:
        chosen = tl.zeros_like(selector)
        for byte in tl.static_range(4):
            index = (selector >> (4 * byte)) & 7
            word = tl.where(index < 4, low, high)
            chosen = chosen | (((word >> (8 * (index & 3))) & 0xFF) << (8 * byte))
        return chosen
    else:
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;",
            "=r,r,r,r",
            [low, high, selector],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )


@triton.jit
def _look_up(codes, BOOK: tl.constexpr):
    """Four 4-bit codes, in the low half of a word, to the four int8 levels of a codebook."""
    zero = tl.zeros_like(codes)
    if BOOK == 0:  # IQ4: -127 -104 -83 -65, -49 -35 -22 -10, 1 13 25 38, 53 69 89 113
        a, b, c, d = zero + (-1079142271), zero + (-152379953), zero + 639175937, zero + 1901675829
    else:  # FP4, twice its values: 0 1 2 3, 4 6 8 12, 0 -1 -2 -3, -4 -6 -8 -12
        a, b, c, d = zero + 50462976, zero + 201852420, zero + (-33620224), zero + (-185009412)
    index = codes & 0x7777
    selector = ((codes & 0x8888) >> 1) | 0x3210
    return _select_bytes(_select_bytes(a, b, index), _select_bytes(c, d, index), selector)


@triton.jit
def quad(words, GROUP: tl.constexpr, TILE: tl.constexpr):
    """The codes of elements 4·GROUP… of every block, as the bytes of a word; unsigned up to NIBBLE_2."""
    PART: tl.constexpr = GROUP % 4
    UPPER: tl.constexpr = GROUP // 4
    if TILE.code == BYTE:
        codes = words[GROUP]
    elif TILE.code == CODEBOOK:
        codes = _look_up((words[PART] >> (16 * UPPER)) & 0xFFFF, TILE.codebook)
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
def low_half(word):
    """The float16 in the low half of a word."""
    return word.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def high_half(word):
    """The float16 in the high half of a word."""
    return (word >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def _masked_load(pointers, mask, MASKED: tl.constexpr):
    if MASKED:
        return tl.load(pointers, mask=mask, other=0)
    else:
        return tl.load(pointers)


@triton.jit
def load_tile(matrix, rows, blocks, BLOCKS: tl.constexpr, MASKED: tl.constexpr, TILE: tl.constexpr):
    """Words, scale and super-scale of `rows` × `blocks`; each (rows, blocks) int32.

    `rows` and `blocks` are index vectors; the matrix has BLOCKS blocks a row, MASKED if `blocks` may go beyond.
    """
    inside = (blocks < BLOCKS)[None, :]
    row, block = rows[:, None], blocks[None, :]
    if TILE.code == BYTE:
        PLANES: tl.constexpr = 8
    elif TILE.code == NIBBLE_1:
        PLANES: tl.constexpr = 5
    elif TILE.code == NIBBLE_2:
        PLANES: tl.constexpr = 6
    elif TILE.code == HALF or TILE.code == BRAIN:
        PLANES: tl.constexpr = 16
    elif TILE.code == SINGLE:
        PLANES: tl.constexpr = 32
    else:
        PLANES: tl.constexpr = 4
    pointers = matrix[0] + row * (PLANES * BLOCKS) + block
    words = ()
    for plane in tl.static_range(PLANES):
        words = words + (_masked_load(pointers + plane * BLOCKS, inside, MASKED),)
    if TILE.scale == NO_SCALE:
        scale = words[0]
    elif TILE.scale == PAIR:
        scale = _masked_load(matrix[1] + row * BLOCKS + block, inside, MASKED)
    else:
        scale = _masked_load(matrix[1] + (row // 2) * BLOCKS + block, inside, MASKED) >> ((row & 1) * 16)
    SUPERS: tl.constexpr = BLOCKS // 8
    if TILE.scale == SIGNED:
        pair = _masked_load(matrix[2] + (row // 2) * SUPERS + block % SUPERS, inside, MASKED)
        factor = pair >> ((row & 1) * 16)
    elif TILE.scale == MINIMUM or TILE.scale == SHORT:
        factor = _masked_load(matrix[2] + row * SUPERS + block % SUPERS, inside, MASKED)
    else:
        factor = scale
    return words, scale, factor


@triton.jit
def load_activations(
    activations, blocks, BLOCKS: tl.constexpr, MASKED: tl.constexpr, TILE: tl.constexpr
):
    """One token's activations of `blocks`, (1, blocks) each: int8 words, scales, sums; or 32 floats."""
    inside = blocks < BLOCKS
    planes = ()
    if TILE.scale == NO_SCALE:
        for element in tl.static_range(32):
            pointers = activations + (INTEGER_PLANES + element) * BLOCKS + blocks
            value = _masked_load(pointers, inside, MASKED).to(tl.float32, bitcast=True)
            planes = planes + (value[None, :],)
    else:
        for plane in tl.static_range(INTEGER_PLANES):
            value = _masked_load(activations + plane * BLOCKS + blocks, inside, MASKED)
            if plane == 8 or plane == 9:
                value = value.to(tl.float32, bitcast=True)
            planes = planes + (value[None, :],)
    return planes


@triton.jit
def _float_dot(words, floats, TILE: tl.constexpr):
    total = tl.zeros(words[0].shape, tl.float32)
    if TILE.code == SINGLE:
        for element in tl.static_range(32):
            total += words[element].to(tl.float32, bitcast=True) * floats[element]
    elif TILE.code == BRAIN:
        for pair in tl.static_range(16):
            total += (words[pair] << 16).to(tl.float32, bitcast=True) * floats[2 * pair]
            total += (words[pair] & -65536).to(tl.float32, bitcast=True) * floats[2 * pair + 1]
    else:
        for pair in tl.static_range(16):
            total += low_half(words[pair]) * floats[2 * pair] + high_half(words[pair]) * floats[2 * pair + 1]
    return total


@triton.jit
def dot_tile(tile, activations, TILE: tl.constexpr):
    """Partial dot products (rows, blocks) float32 of a tile with one token's activations.

    Formula: Σ_h scale_h·a_h·(Σ codes·int8 - offset·sum_h) - minimum_h·a_h·sum_h over both halves h.
    """
    words, scale, factor = tile
    if TILE.scale == NO_SCALE:
        return _float_dot(words, activations, TILE)
    else:
        scale0, scale1, sum0, sum1 = activations[8], activations[9], activations[10], activations[11]
        first = tl.zeros_like(words[0]) - TILE.offset * sum0
        second = tl.zeros_like(words[0]) - TILE.offset * sum1
        for group in tl.static_range(4):
            if TILE.code == BYTE or TILE.code == CODEBOOK:
                first = dot_signed(quad(words, group, TILE), activations[group], first)
                second = dot_signed(quad(words, 4 + group, TILE), activations[4 + group], second)
            else:
                first = dot_unsigned(quad(words, group, TILE), activations[group], first)
                second = dot_unsigned(quad(words, 4 + group, TILE), activations[4 + group], second)
        if TILE.scale == SIGNED:
            first = first * ((scale << 24) >> 24)
            second = second * ((scale << 16) >> 24)
        elif TILE.scale == SHORT:
            first = first * (scale & 15)
            second = second * ((scale >> 4) & 15)
        both = first.to(tl.float32) * scale0 + second.to(tl.float32) * scale1
        if TILE.scale == FLOAT16:
            return low_half(scale) * both
        elif TILE.scale == BFLOAT16:
            return (scale << 16).to(tl.float32, bitcast=True) * both
        elif TILE.scale == SIGNED:
            return low_half(factor) * both
        else:
            sums = sum0.to(tl.float32) * scale0 + sum1.to(tl.float32) * scale1
            if TILE.scale == PAIR:
                return low_half(scale) * both + high_half(scale) * sums
            elif TILE.scale == MINIMUM:
                minimum = high_half(factor) * ((scale >> 8) & 255).to(tl.float32)
                return low_half(factor) * (scale & 255).to(tl.float32) * both - minimum * sums
            else:
                minimum0 = ((scale >> 8) & 15) * sum0
                minimum1 = ((scale >> 12) & 15) * sum1
                sums = minimum0.to(tl.float32) * scale0 + minimum1.to(tl.float32) * scale1
                return low_half(factor) * both - high_half(factor) * sums


@triton.jit
def _add_step(
    sums,
    matrix,
    activations,
    stride,
    rows,
    blocks,
    BLOCKS: tl.constexpr,
    MASKED: tl.constexpr,
    TILE: tl.constexpr,
):
    """The tuple of `sums`, one vector for each token, with the dot products of some more blocks added."""
    tile = load_tile(matrix, rows, blocks, BLOCKS, MASKED, TILE)
    grown = ()
    for token in tl.static_range(len(sums)):
        part = load_activations(activations + token * stride, blocks, BLOCKS, MASKED, TILE)
        grown = grown + (sums[token] + tl.sum(dot_tile(tile, part, TILE), axis=1),)
    return grown


@triton.jit
def _zeros(rows, TOKENS: tl.constexpr):
    """A tuple of TOKENS zeroed vectors."""
    sums = ()
    for token in tl.static_range(TOKENS):
        sums = sums + (rows * 0.0,)
    return sums


@triton.jit
def project(
    matrix,
    activations,
    stride,
    rows,
    BLOCKS: tl.constexpr,
    STEP: tl.constexpr,
    TOKENS: tl.constexpr,
    TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """`rows` of the matrix times the activations of TOKENS tokens: a tuple of TOKENS float32 vectors.

    Takes STEP blocks of a row at a time. For one token the steps are laid out behind each other, and the first
    weights are loaded before the producers of the activations are waited for; for several they are a loop.
    Tokens lie `stride` words apart.
    """
    blocks = tl.arange(0, STEP)
    if TOKENS == 1:
        tile = load_tile(matrix, rows, blocks, BLOCKS, STEP > BLOCKS, TILE)
        wait_for_producers(DEPENDENT)
        part = load_activations(activations, blocks, BLOCKS, STEP > BLOCKS, TILE)
        total = dot_tile(tile, part, TILE)
        for start in tl.static_range(STEP, BLOCKS, STEP):
            at = start + blocks
            tile = load_tile(matrix, rows, at, BLOCKS, start + STEP > BLOCKS, TILE)
            part = load_activations(activations, at, BLOCKS, start + STEP > BLOCKS, TILE)
            total += dot_tile(tile, part, TILE)
        return (tl.sum(total, axis=1),)
    else:
        wait_for_producers(DEPENDENT)
        sums = _zeros(rows, TOKENS)
        for start in tl.range(0, BLOCKS, STEP, num_stages=1):
            sums = _add_step(
                sums, matrix, activations, stride, rows, start + blocks, BLOCKS, BLOCKS % STEP > 0, TILE
            )
        return sums


@triton.jit
def _same_kind(activations, blocks, part, BLOCKS: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """The activations as the second matrix wants them; `part` are the first's."""
    if (FIRST.scale == NO_SCALE) == (SECOND.scale == NO_SCALE):
        return part
    else:
        return load_activations(activations, blocks, BLOCKS, True, SECOND)


@triton.jit
def project_pair(
    first,
    second,
    activations,
    stride,
    rows,
    BLOCKS: tl.constexpr,
    STEP: tl.constexpr,
    TOKENS: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """`project` for the same rows of two matrices at once: both tuples of sums."""
    blocks = tl.arange(0, STEP)
    if TOKENS == 1:
        tile = load_tile(first, rows, blocks, BLOCKS, STEP > BLOCKS, FIRST)
        other = load_tile(second, rows, blocks, BLOCKS, STEP > BLOCKS, SECOND)
        wait_for_producers(DEPENDENT)
        part = load_activations(activations, blocks, BLOCKS, STEP > BLOCKS, FIRST)
        total = dot_tile(tile, part, FIRST)
        part = _same_kind(activations, blocks, part, BLOCKS, FIRST, SECOND)
        other_total = dot_tile(other, part, SECOND)
        for start in tl.static_range(STEP, BLOCKS, STEP):
            at = start + blocks
            tile = load_tile(first, rows, at, BLOCKS, start + STEP > BLOCKS, FIRST)
            other = load_tile(second, rows, at, BLOCKS, start + STEP > BLOCKS, SECOND)
            part = load_activations(activations, at, BLOCKS, start + STEP > BLOCKS, FIRST)
            total += dot_tile(tile, part, FIRST)
            part = _same_kind(activations, at, part, BLOCKS, FIRST, SECOND)
            other_total += dot_tile(other, part, SECOND)
        return (tl.sum(total, axis=1),), (tl.sum(other_total, axis=1),)
    else:
        firsts = project(first, activations, stride, rows, BLOCKS, STEP, TOKENS, FIRST, DEPENDENT)
        seconds = project(second, activations, stride, rows, BLOCKS, STEP, TOKENS, SECOND, False)
        return firsts, seconds


@triton.jit
def quantise(values, activations, group, inside, BLOCKS: tl.constexpr, PLANES: tl.constexpr):
    """Store values (groups, 16) float32 as activations; `group` says which sixteen elements each row holds.

    `inside`: groups to be stored. Writes 12 words for 32 values, and the values where PLANES says so.
    """
    GROUPS: tl.constexpr = values.shape[0]
    block = group // 2
    place = (block % 8) * (BLOCKS // 8) + block // 8
    half = group % 2
    largest = tl.max(tl.abs(values), axis=1)
    inverse = tl.where(largest > 0, 127.0 / largest, 0.0)
    rounded = tl.floor(values * inverse[:, None] + 0.5).to(tl.int32)
    element = tl.arange(0, 16)[None, :]
    shifted = (rounded & 255) << (8 * (element % 4))
    words = tl.sum(tl.reshape(shifted, (GROUPS, 4, 4)), axis=2)
    word = tl.arange(0, 4)[None, :]
    tl.store(activations + (half[:, None] * 4 + word) * BLOCKS + place[:, None], words, mask=inside[:, None])
    scale = (largest / 127.0).to(tl.int32, bitcast=True)
    tl.store(activations + (8 + half) * BLOCKS + place, scale, mask=inside)
    tl.store(activations + (10 + half) * BLOCKS + place, tl.sum(rounded, axis=1), mask=inside)
    if PLANES == FLOAT_PLANES:
        plane = INTEGER_PLANES + half[:, None] * 16 + element
        tl.store(activations + plane * BLOCKS + place[:, None], values.to(tl.int32, bitcast=True), mask=inside[:, None])


@triton.jit
def decode_elements(matrix, row, column, BLOCKS: tl.constexpr, TILE: tl.constexpr):
    """The weights at `row`, `column` (tensors that broadcast), float32; one word is read for each."""
    block, element = column // 32, column % 32
    place = (block % 8) * (BLOCKS // 8) + block // 8
    upper, part, byte = element // 16, (element % 16) // 4, element % 4
    if TILE.code == SINGLE:
        word = tl.load(matrix[0] + row * (32 * BLOCKS) + element * BLOCKS + place)
        return word.to(tl.float32, bitcast=True)
    elif TILE.code == HALF or TILE.code == BRAIN:
        word = tl.load(matrix[0] + row * (16 * BLOCKS) + (element // 2) * BLOCKS + place)
        word = word >> (16 * (element % 2))
        if TILE.code == HALF:
            return low_half(word)
        else:
            return (word << 16).to(tl.float32, bitcast=True)
    else:
        code = _decode_code(matrix, row, place, upper, part, byte, BLOCKS, TILE)
        return _scale_code(matrix, row, block, place, upper, code, BLOCKS, TILE)


@triton.jit
def _decode_code(matrix, row, place, upper, part, byte, BLOCKS: tl.constexpr, TILE: tl.constexpr):
    """The code of an element, its offset taken off, int32."""
    if TILE.code == BYTE:
        word = tl.load(matrix[0] + row * (8 * BLOCKS) + (4 * upper + part) * BLOCKS + place)
        return (word << (24 - 8 * byte)) >> 24
    elif TILE.code == CODEBOOK:
        word = tl.load(matrix[0] + row * (4 * BLOCKS) + part * BLOCKS + place)
        levels = _look_up((word >> (16 * upper)) & 0xFFFF, TILE.codebook)
        return (levels << (24 - 8 * byte)) >> 24
    elif TILE.code == NIBBLE_1:
        pointers = matrix[0] + row * (5 * BLOCKS) + place
        code = (tl.load(pointers + part * BLOCKS) >> (8 * byte + 4 * upper)) & 15
        high = (tl.load(pointers + 4 * BLOCKS) >> (8 * byte + 4 * upper + part)) & 1
        return (code | (high << 4)) - TILE.offset
    elif TILE.code == NIBBLE_2:
        pointers = matrix[0] + row * (6 * BLOCKS) + place
        code = (tl.load(pointers + part * BLOCKS) >> (8 * byte + 4 * upper)) & 15
        high = (tl.load(pointers + (4 + upper) * BLOCKS) >> (8 * byte + 2 * part)) & 3
        return (code | (high << 4)) - TILE.offset
    else:
        word = tl.load(matrix[0] + row * (4 * BLOCKS) + part * BLOCKS + place)
        return ((word >> (8 * byte + 4 * upper)) & 15) - TILE.offset


@triton.jit
def _scale_code(
    matrix, row, block, place, upper, code, BLOCKS: tl.constexpr, TILE: tl.constexpr
):
    """Code to weight."""
    SUPERS: tl.constexpr = BLOCKS // 8
    value = code.to(tl.float32)
    if TILE.scale == PAIR:
        scale = tl.load(matrix[1] + row * BLOCKS + place)
        return low_half(scale) * value + high_half(scale)
    else:
        scale = tl.load(matrix[1] + (row // 2) * BLOCKS + place) >> ((row & 1) * 16)
        if TILE.scale == FLOAT16:
            return low_half(scale) * value
        elif TILE.scale == BFLOAT16:
            return (scale << 16).to(tl.float32, bitcast=True) * value
        elif TILE.scale == SIGNED:
            factor = tl.load(matrix[2] + (row // 2) * SUPERS + block // 8) >> ((row & 1) * 16)
            step = (scale << (24 - 8 * upper)) >> 24
            return low_half(factor) * step.to(tl.float32) * value
        else:
            factor = tl.load(matrix[2] + row * SUPERS + block // 8)
            if TILE.scale == MINIMUM:
                step, minimum = scale & 255, (scale >> 8) & 255
            else:
                step, minimum = (scale >> (4 * upper)) & 15, (scale >> (8 + 4 * upper)) & 15
            lowest = high_half(factor) * minimum.to(tl.float32)
            return low_half(factor) * step.to(tl.float32) * value - lowest
