"""Dot products of bytes on 64-bit ARM: with `sdot`, `smmla`, or by widening multiplications.

A register of weights has 128 bits: four columns of four rows. All methods take signed weights and unsigned
ones below 128.
"""

from typing import Any

from llvmlite import ir

from edgeinfer_kernels.cpu.native.simd.lanes import (
    I8,
    I16,
    I32,
    I64,
    LANES,
    as_bytes,
    call,
    constant_lanes,
    join,
    load,
    part,
)

LARGEST_ACTIVATION = 127
LARGEST_INT16 = 32767
REGISTERS = 4
"""Registers of 128 bits that hold sixteen lanes."""
WORDS = ir.VectorType(I32, 4)
SHORTS = ir.VectorType(I16, 8)
BYTES = ir.VectorType(I8, 16)


def splat_words(builder: Any, at: Any, count: int) -> list[Any]:
    """`count` words at an address, each in all lanes. Four of them are one load, as `sdot` can multiply by
    one word of a register.
    """
    words = []
    for first in range(0, count, 4):
        size = min(4, count - first)
        offset = builder.add(at, ir.Constant(at.type, 4 * first))
        loaded = load(builder, offset, ir.VectorType(I32, size))
        undefined = ir.Constant(loaded.type, ir.Undefined)
        words += [
            builder.shuffle_vector(loaded, undefined, constant_lanes(I32, LANES, index))
            for index in range(size)
        ]
    return words


def dot_by_instruction(builder: Any, total: Any, weights: list[Any], activations: list[Any]) -> Any:
    """Four `sdot` for each vector of weights."""
    sums = [part(builder, total, index, REGISTERS) for index in range(REGISTERS)]
    for w, a in zip(weights, activations, strict=True):
        signs = as_bytes(builder, a)
        for index in range(REGISTERS):
            operands = [sums[index], part(builder, w, index, 4), part(builder, signs, index, 4)]
            sums[index] = call(builder, "llvm.aarch64.neon.sdot.v4i32.v16i8", WORDS, operands)
    return join(builder, sums)


def dot_by_widening(builder: Any, weights: list[Any], activations: list[Any], largest: int) -> Any:
    """`smull` and `smlal` add products in int16 as long as they cannot overflow, then `sadalp` in int32."""
    fitting = max(1, LARGEST_INT16 // (largest * LARGEST_ACTIVATION))
    pieces = 2 * REGISTERS  # of eight bytes: four columns of two rows
    totals: list[Any] = [None] * pieces
    narrow: list[Any] = [None] * pieces
    for index, (w, a) in enumerate(zip(weights, activations, strict=True)):
        signs = as_bytes(builder, a)
        last = index % fitting == fitting - 1 or index == len(weights) - 1
        for piece in range(pieces):
            operands = [part(builder, w, piece, pieces), part(builder, signs, piece, pieces)]
            products = call(builder, "llvm.aarch64.neon.smull.v8i16", SHORTS, operands)
            narrow[piece] = products if narrow[piece] is None else builder.add(narrow[piece], products)
            if last:
                wide = call(builder, "llvm.aarch64.neon.saddlp.v4i32.v8i16", WORDS, [narrow[piece]])
                totals[piece] = wide if totals[piece] is None else builder.add(totals[piece], wide)
                narrow[piece] = None
    return join(builder, [_add_pairs(builder, *totals[i : i + 2]) for i in range(0, pieces, 2)])


def _add_pairs(builder: Any, low: Any, high: Any) -> Any:
    return call(builder, "llvm.aarch64.neon.addp.v4i32", WORDS, [low, high])


def dot_of_four_tokens(builder: Any, weights: list[Any], tokens: list[Any]) -> Any:
    """`smmla`: two rows times two tokens, eight columns each. `tokens`: addresses of the activations.

    Returns the sums of sixteen rows with the first token, then with the others: 64 int32.
    """
    pairs = [_columns_of_two_tokens(builder, tokens[i : i + 2], len(weights)) for i in (0, 2)]
    quarters: list[list[Any]] = [[] for _ in tokens]
    for index in range(REGISTERS):
        rows = [_two_rows(builder, weights, index, high) for high in (0, 1)]
        for pair, columns in enumerate(pairs):
            low, high = (_matrix_product(builder, each, columns) for each in rows)
            for token in (0, 1):
                quarters[2 * pair + token].append(_picked(builder, low, high, (token, token + 2)))
    return join(builder, [join(builder, quarter) for quarter in quarters])


def _matrix_product(builder: Any, rows: list[Any], columns: list[Any]) -> Any:
    """Two rows times two tokens: (row 0, token 0), (row 0, token 1), (row 1, token 0), (row 1, token 1)."""
    total = constant_lanes(I32, 4, 0)
    for x, y in zip(rows, columns, strict=True):
        total = call(builder, "llvm.aarch64.neon.smmla.v4i32.v16i8", WORDS, [total, x, y])
    return total


def _two_rows(builder: Any, weights: list[Any], index: int, high: int) -> list[Any]:
    """Rows 4·index + 2·high and the next one, eight columns to a register (`zip1`, `zip2`)."""
    words = [builder.bitcast(part(builder, w, index, REGISTERS), WORDS) for w in weights]
    first = 2 * high
    mask = ir.Constant(WORDS, [first, first + 4, first + 1, first + 5])
    return [
        builder.bitcast(builder.shuffle_vector(*words[i : i + 2], mask), BYTES)
        for i in range(0, len(words), 2)
    ]


def _columns_of_two_tokens(builder: Any, tokens: list[Any], registers: int) -> list[Any]:
    """Eight columns of two tokens to a register; two such registers are loaded at a time."""
    doubles, result = ir.VectorType(I64, 2), []
    for first in range(0, registers, 4):
        loaded = [load(builder, builder.add(at, ir.Constant(at.type, 4 * first)), doubles) for at in tokens]
        for half in (0, 1):
            mask = ir.Constant(ir.VectorType(I32, 2), [half, half + 2])
            result.append(builder.bitcast(builder.shuffle_vector(*loaded, mask), BYTES))
    return result


def _picked(builder: Any, low: Any, high: Any, lanes: tuple[int, int]) -> Any:
    """Two lanes of `low`, then the same two of `high`."""
    mask = ir.Constant(WORDS, [*lanes, *(lane + 4 for lane in lanes)])
    return builder.shuffle_vector(low, high, mask)
