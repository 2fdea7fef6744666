"""Sixteen rows against up to eight tokens on the tensor cores: weights are unpacked once for all tokens.

Kernels hold one element a thread here: a tensor of 32·warps elements lies so that element i is thread i, and
what a warp's matrix instruction wants of each of its 32 lanes is loaded by that lane. Lane l = 4·g + t has
rows g and g + 8, of each block the weights that word t of its planes holds, and the tokens' values beside
them; of the result it gets tokens 2·t and 2·t + 1 of its rows. A warp takes eight blocks at a time, in loads
of 16 bytes: four blocks of one plane. Needs compute capability 8.0.
"""

import triton
import triton.language as tl

from edgeinfer_kernels.cuda.tiles import INTEGER_PLANES, scaled_sum, wait_for_producers
from edgeinfer_kernels.cuda.warp_products import multiply_bytes, multiply_floats
from edgeinfer_kernels.cuda.words import (
    BRAIN,
    BYTE,
    CODEBOOK,
    HALF,
    INTERPRETED,
    MINIMUM,
    NIBBLE_1,
    NIBBLE_2,
    NO_SCALE,
    PAIR,
    SHORT,
    SIGNED,
    high_half,
    look_up,
    low_half,
)

COLUMNS = tl.constexpr(8)
"""Tokens of a tensor-core tile."""
UNIT = tl.constexpr(8)
"""Blocks that a warp takes at a time: 32 bytes of a plane, what memory delivers at least."""


@triton.jit
def _load_four(pointers):
    """The four words at each of `pointers`, which are multiples of 16 bytes."""
    if INTERPRETED:
        return tl.load(pointers), tl.load(pointers + 1), tl.load(pointers + 2), tl.load(pointers + 3)
    else:
        return tl.inline_asm_elementwise(
            "ld.global.v4.b32 {$0, $1, $2, $3}, [$4];",
            "=r,=r,=r,=r,l",
            [pointers],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )


@triton.jit
def _load_four_inside(pointers, inside):
    """`_load_four`; zeros where `inside` is 0, whose pointers may lead anywhere."""
    if INTERPRETED:
        mask = inside != 0
        first, second = tl.load(pointers, mask, 0), tl.load(pointers + 1, mask, 0)
        return first, second, tl.load(pointers + 2, mask, 0), tl.load(pointers + 3, mask, 0)
    else:
        return tl.inline_asm_elementwise(
            "{ .reg .pred p; setp.ne.b32 p, $5, 0; mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; "
            "mov.b32 $3, 0; @p ld.global.v4.b32 {$0, $1, $2, $3}, [$4]; }",
            "=&r,=&r,=&r,=&r,l,r",
            [pointers, inside],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )


@triton.jit
def _row_words(matrix, row, part, place, inside, BLOCKS: tl.constexpr, TILE: tl.constexpr):
    """What a lane needs of four blocks of its row: a tuple of planes, each a tuple of four words."""
    if TILE.code == BYTE:
        pointers = matrix[0] + row * (8 * BLOCKS) + part * BLOCKS + place
        return _load_four_inside(pointers, inside), _load_four_inside(pointers + 4 * BLOCKS, inside)
    elif TILE.code == HALF or TILE.code == BRAIN:
        pointers = matrix[0] + row * (16 * BLOCKS) + part * BLOCKS + place
        return (
            _load_four_inside(pointers, inside),
            _load_four_inside(pointers + 4 * BLOCKS, inside),
            _load_four_inside(pointers + 8 * BLOCKS, inside),
            _load_four_inside(pointers + 12 * BLOCKS, inside),
        )
    elif TILE.code == NIBBLE_1:
        pointers = matrix[0] + row * (5 * BLOCKS) + place
        words = _load_four_inside(pointers + part * BLOCKS, inside)
        return words, _load_four_inside(pointers + 4 * BLOCKS, inside)
    elif TILE.code == NIBBLE_2:
        pointers = matrix[0] + row * (6 * BLOCKS) + place
        words = _load_four_inside(pointers + part * BLOCKS, inside)
        more = _load_four_inside(pointers + 4 * BLOCKS, inside)
        return words, more, _load_four_inside(pointers + 5 * BLOCKS, inside)
    else:
        return (_load_four_inside(matrix[0] + row * (4 * BLOCKS) + part * BLOCKS + place, inside),)


@triton.jit
def _row_scales(matrix, row, place, inside, BLOCKS: tl.constexpr, TILE: tl.constexpr):
    """Scales of four blocks of a lane's row, and their factors: tuples of four words."""
    SUPERS: tl.constexpr = BLOCKS // 8
    if TILE.scale == NO_SCALE:
        scales = (inside, inside, inside, inside)
        return scales, scales
    elif TILE.scale == PAIR:
        scales = _load_four_inside(matrix[1] + row * BLOCKS + place, inside)
        return scales, scales
    else:
        shift = (row & 1) * 16
        both = _load_four_inside(matrix[1] + (row // 2) * BLOCKS + place, inside)
        scales = both[0] >> shift, both[1] >> shift, both[2] >> shift, both[3] >> shift
        if TILE.scale == SIGNED:
            factors = _factors(matrix[2] + (row // 2) * SUPERS, place, inside, SUPERS)
            return scales, (
                factors[0] >> shift,
                factors[1] >> shift,
                factors[2] >> shift,
                factors[3] >> shift,
            )
        elif TILE.scale == MINIMUM or TILE.scale == SHORT:
            return scales, _factors(matrix[2] + row * SUPERS, place, inside, SUPERS)
        else:
            return scales, scales


@triton.jit
def _factors(pointers, place, inside, SUPERS: tl.constexpr):
    """The factors of the super-blocks of four neighbouring places; they lie in a ring."""
    if SUPERS % 4 == 0:
        return _load_four_inside(pointers + place % SUPERS, inside)
    else:
        mask = inside != 0
        first = tl.load(pointers + place % SUPERS, mask, 0)
        second = tl.load(pointers + (place + 1) % SUPERS, mask, 0)
        third = tl.load(pointers + (place + 2) % SUPERS, mask, 0)
        return first, second, third, tl.load(pointers + (place + 3) % SUPERS, mask, 0)


@triton.jit
def load_rows(matrix, row, part, place, inside, BLOCKS: tl.constexpr, TILE: tl.constexpr):
    """What a lane needs of four blocks of rows `row` and `row` + 8; nothing but zeros outside."""
    return (
        _row_words(matrix, row, part, place, inside, BLOCKS, TILE),
        _row_words(matrix, row + 8, part, place, inside, BLOCKS, TILE),
        _row_scales(matrix, row, place, inside, BLOCKS, TILE),
        _row_scales(matrix, row + 8, place, inside, BLOCKS, TILE),
    )


@triton.jit
def load_tokens(own, pair, part, place, BLOCKS: tl.constexpr, TILE: tl.constexpr):
    """What a lane needs of four blocks of activations: the values of its own token, the scales of two.

    `own`: where token g begins; `pair`: where tokens 2t and 2t + 1 do, both pointers.
    """
    if TILE.scale == NO_SCALE:
        values = ()
        for word in tl.static_range(4):
            plane = INTEGER_PLANES + 2 * (part + 4 * word)
            values = values + (_load_four(own + plane * BLOCKS + place),)
            values = values + (_load_four(own + (plane + 1) * BLOCKS + place),)
        return values, values, values
    else:
        values = _load_four(own + part * BLOCKS + place), _load_four(own + (4 + part) * BLOCKS + place)
        scales = ()
        sums = ()
        for token in tl.static_range(2):
            for plane in tl.static_range(2):
                scales = scales + (_load_four(pair[token] + (8 + plane) * BLOCKS + place),)
                if TILE.scale == PAIR or TILE.scale == MINIMUM or TILE.scale == SHORT:
                    sums = sums + (_load_four(pair[token] + (10 + plane) * BLOCKS + place),)
        return values, scales, sums


@triton.jit
def _codes(words, index: tl.constexpr, part, TILE: tl.constexpr):
    """A lane's codes of both halves of a block, as bytes; those with an offset at the bytes' top, signed.

    An offset of 2^(b-1) makes b bits a two's complement but for the first; at the top of a byte they are the
    code times 2^(8-b).
    """
    if TILE.code == BYTE:
        return words[0][index], words[1][index]
    elif TILE.code == CODEBOOK:
        word = words[0][index]
        return look_up(word & 0xFFFF, TILE.codebook), look_up((word >> 16) & 0xFFFF, TILE.codebook)
    else:
        word = words[0][index]
        first, second = word & 0x0F0F0F0F, (word >> 4) & 0x0F0F0F0F
        if TILE.code == NIBBLE_1:
            more = words[1][index] >> part
            first = first | ((more & 0x01010101) << 4)
            second = second | (more & 0x10101010)
        elif TILE.code == NIBBLE_2:
            first = first | (((words[1][index] >> (2 * part)) & 0x03030303) << 4)
            second = second | (((words[2][index] >> (2 * part)) & 0x03030303) << 4)
        if TILE.offset > 0:
            RAISE: tl.constexpr = 128 // TILE.offset
            first, second = (first * RAISE) ^ -2139062144, (second * RAISE) ^ -2139062144
        return first, second


@triton.jit
def _add_floats(sums, upper, lower, values, index: tl.constexpr, TILE: tl.constexpr):
    """`sums` with block `index` of a tile of float weights."""
    for word in tl.static_range(4):
        above, below = upper[word][index], lower[word][index]
        right0 = values[2 * word][index].to(tl.float32, bitcast=True)
        right1 = values[2 * word + 1][index].to(tl.float32, bitcast=True)
        if TILE.code == HALF:
            sums = multiply_floats(
                sums, low_half(above), high_half(above), low_half(below), high_half(below), right0, right1
            )
        else:
            sums = multiply_floats(
                sums,
                (above << 16).to(tl.float32, bitcast=True),
                (above & -65536).to(tl.float32, bitcast=True),
                (below << 16).to(tl.float32, bitcast=True),
                (below & -65536).to(tl.float32, bitcast=True),
                right0,
                right1,
            )
    return sums


@triton.jit
def _worth(
    first, second, row_scales, scales, sums, index: tl.constexpr, AT: tl.constexpr, TILE: tl.constexpr
):
    """What the integer sums of block `index` are worth; `AT`: where a token's scales and sums begin."""
    scale0 = scales[AT][index].to(tl.float32, bitcast=True)
    scale1 = scales[AT + 1][index].to(tl.float32, bitcast=True)
    scale, factor = row_scales[0][index], row_scales[1][index]
    if TILE.scale == PAIR or TILE.scale == MINIMUM or TILE.scale == SHORT:
        sum0, sum1 = sums[AT][index], sums[AT + 1][index]
        return scaled_sum(first, second, scale, factor, scale0, scale1, sum0, sum1, TILE)
    else:
        return scaled_sum(first, second, scale, factor, scale0, scale1, first, second, TILE)


@triton.jit
def add_products(totals, rows, tokens, part, TILE: tl.constexpr):
    """`totals`, four float32 a lane as of `multiply_bytes`, with the products of four blocks added.

    With an offset they are too large by 128 // offset; `unraised` takes that back at the end.
    """
    upper, lower, upper_scales, lower_scales = rows
    values, scales, sums = tokens
    IS_SIGNED: tl.constexpr = TILE.offset > 0 or TILE.code == BYTE or TILE.code == CODEBOOK
    for index in tl.static_range(4):
        if TILE.scale == NO_SCALE:
            totals = _add_floats(totals, upper, lower, values, index, TILE)
        else:
            above0, above1 = _codes(upper, index, part, TILE)
            below0, below1 = _codes(lower, index, part, TILE)
            first = multiply_bytes(above0, below0, values[0][index], IS_SIGNED)
            second = multiply_bytes(above1, below1, values[1][index], IS_SIGNED)
            grown = ()
            for at in tl.static_range(4):
                if at < 2:
                    row_scales = upper_scales
                else:
                    row_scales = lower_scales
                value = _worth(first[at], second[at], row_scales, scales, sums, index, 2 * (at % 2), TILE)
                grown = grown + (totals[at] + value,)
            totals = grown
    return totals


@triton.jit
def _lanes(activations, stride, TOKENS: tl.constexpr, WARPS: tl.constexpr):
    """Of every thread: its warp, g, t, and where its tokens begin: number g, and the pair 2t, 2t + 1.

    Beyond the last token the last is taken again.
    """
    thread = tl.arange(0, 32 * WARPS)
    group, part = (thread % 32) // 4, thread % 4
    own = activations + tl.minimum(group, TOKENS - 1) * stride
    left = activations + tl.minimum(2 * part, TOKENS - 1) * stride
    right = activations + tl.minimum(2 * part + 1, TOKENS - 1) * stride
    return thread // 32, group, part, own, (left, right)


@triton.jit
def _load_half(matrix, row, part, unit, HALF_AT: tl.constexpr, BLOCKS: tl.constexpr, TILE: tl.constexpr):
    """`load_rows` of four blocks of a unit, from HALF_AT on."""
    inside = (unit < BLOCKS // UNIT).to(tl.int32)
    return load_rows(matrix, row, part, unit * UNIT + HALF_AT, inside, BLOCKS, TILE)


@triton.jit
def project_on_tensor_cores(
    matrix,
    activations,
    stride,
    first_row,
    BLOCKS: tl.constexpr,
    TOKENS: tl.constexpr,
    WARPS: tl.constexpr,
    TILE: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """(8, 16) float32: the activations of TOKENS tokens times sixteen rows of the matrix.

    The warps share a row's blocks; while half a unit is worked on, the next is on its way.
    """
    warp, group, part, own, pair = _lanes(activations, stride, TOKENS, WARPS)
    row = first_row + group
    UNITS: tl.constexpr = BLOCKS // UNIT
    near = _load_half(matrix, row, part, warp, 0, BLOCKS, TILE)
    wait_for_producers(DEPENDENT)
    zero = warp * 0.0
    totals = zero, zero, zero, zero
    for first in tl.range(0, UNITS, WARPS, num_stages=1):
        unit = first + warp
        place = tl.minimum(unit, UNITS - 1) * UNIT
        far = _load_half(matrix, row, part, unit, 4, BLOCKS, TILE)
        tokens = load_tokens(own, pair, part, place, BLOCKS, TILE)
        totals = add_products(totals, near, tokens, part, TILE)
        near = _load_half(matrix, row, part, unit + WARPS, 0, BLOCKS, TILE)
        tokens = load_tokens(own, pair, part, place + 4, BLOCKS, TILE)
        totals = add_products(totals, far, tokens, part, TILE)
    return tokens_by_rows(totals, TILE)


@triton.jit
def _load_tokens_for(own, pair, part, place, BLOCKS: tl.constexpr, FIRST: tl.constexpr, SECOND: tl.constexpr):
    """`load_tokens` for two formats of one kind: with sums if either needs them."""
    if SECOND.scale == PAIR or SECOND.scale == MINIMUM or SECOND.scale == SHORT:
        return load_tokens(own, pair, part, place, BLOCKS, SECOND)
    else:
        return load_tokens(own, pair, part, place, BLOCKS, FIRST)


@triton.jit
def project_pair_on_tensor_cores(
    first_matrix,
    second_matrix,
    activations,
    stride,
    first_row,
    BLOCKS: tl.constexpr,
    TOKENS: tl.constexpr,
    WARPS: tl.constexpr,
    FIRST: tl.constexpr,
    SECOND: tl.constexpr,
    DEPENDENT: tl.constexpr,
):
    """`project_on_tensor_cores` for the same rows of two matrices of one kind, quantised or float."""
    warp, group, part, own, pair = _lanes(activations, stride, TOKENS, WARPS)
    row = first_row + group
    UNITS: tl.constexpr = BLOCKS // UNIT
    near = _load_half(first_matrix, row, part, warp, 0, BLOCKS, FIRST)
    other_near = _load_half(second_matrix, row, part, warp, 0, BLOCKS, SECOND)
    wait_for_producers(DEPENDENT)
    zero = warp * 0.0
    totals = zero, zero, zero, zero
    others = zero, zero, zero, zero
    for first in tl.range(0, UNITS, WARPS, num_stages=1):
        unit = first + warp
        place = tl.minimum(unit, UNITS - 1) * UNIT
        far = _load_half(first_matrix, row, part, unit, 4, BLOCKS, FIRST)
        other_far = _load_half(second_matrix, row, part, unit, 4, BLOCKS, SECOND)
        tokens = _load_tokens_for(own, pair, part, place, BLOCKS, FIRST, SECOND)
        totals = add_products(totals, near, tokens, part, FIRST)
        others = add_products(others, other_near, tokens, part, SECOND)
        near = _load_half(first_matrix, row, part, unit + WARPS, 0, BLOCKS, FIRST)
        other_near = _load_half(second_matrix, row, part, unit + WARPS, 0, BLOCKS, SECOND)
        tokens = _load_tokens_for(own, pair, part, place + 4, BLOCKS, FIRST, SECOND)
        totals = add_products(totals, far, tokens, part, FIRST)
        others = add_products(others, other_far, tokens, part, SECOND)
    return tokens_by_rows(totals, FIRST), tokens_by_rows(others, SECOND)


@triton.jit
def tokens_by_rows(totals, TILE: tl.constexpr):
    """(8, 16) float32, tokens by rows, of what every lane of every warp has summed up."""
    WARPS: tl.constexpr = totals[0].shape[0] // 32
    parts = ()
    for at in tl.static_range(4):
        parts = parts + (tl.sum(tl.reshape(totals[at], (WARPS, 32)), axis=0),)
    upper, lower = tl.join(parts[0], parts[1]), tl.join(parts[2], parts[3])
    both = tl.reshape(tl.join(upper, lower), (8, 4, 2, 2))
    values = tl.reshape(tl.permute(both, (1, 2, 3, 0)), (8, 16))
    if TILE.offset > 0:
        values = values * (TILE.offset / 128.0)
    return values
