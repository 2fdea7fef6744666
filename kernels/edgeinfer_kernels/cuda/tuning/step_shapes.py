"""Tile configs of a decode step's kernels, with defaults for models that were not tuned."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from edgeinfer_kernels.cuda.triton_ops.kernel_args import GemvConfig
from edgeinfer_kernels.cuda.weights.plane_formats import (
    FLOAT_CODES,
    ROW_MULTIPLE,
    Code,
    PlaneShapes,
    padded_blocks,
)

MAX_SPLITS, FEW_SPLITS = 64, 16
"""Maximum number of KV splits that the step's buffers allow, and the number allowed for any cache size."""
MIN_SPLIT_POSITIONS = 256
"""Minimum positions that justify a further KV split while the cache is short."""

FEW_BLOCKS = 8
"""Blocks of float32 rows that a program may read at a time for any number of tokens."""
LATENT_TILE = 16
"""Query rows of a program of latent attention."""
MAX_LATENT_PARTS = 2048
"""Maximum number of query rows times KV splits of latent attention: enough programs for a large GPU."""


def next_power_of_two(value: int) -> int:
    return 1 << (value - 1).bit_length()


def previous_power_of_two(value: int) -> int:
    """The largest power of two that isn't above the value, or 0."""
    return 1 << value.bit_length() >> 1


def latent_rows(heads: int, tokens: int) -> int:
    """Query rows of a latent attention step, in tiles of LATENT_TILE."""
    return -(-heads * tokens // LATENT_TILE) * LATENT_TILE


def latent_splits(rows: int, splits: int) -> int:
    """Number of KV splits of a latent attention step with this many query rows, of at most `splits`."""
    return max(min(splits, MAX_LATENT_PARTS // rows), 1)


@dataclass(frozen=True)
class Shape:
    """A tile config: blocks of a row per iteration and warps of a program; 0: a generic default.

    In a step of several tokens, `vector`: adjacent blocks per thread; `unrolled`: 1 if the program has code
    for each of a few iterations, which takes fewer registers than loading the next blocks ahead; above 1: for
    each iteration of a row that has at most as many after the first one, so that the compiler loads the next
    blocks while it multiplies. Longer rows have the code of 1. splits: programs that share the blocks of a
    row, of kernels that add to the hidden states. registers: at most as many for each thread; 0: as many as
    the compiler wants. A lower limit lets a multiprocessor have more programs. With a higher one the compiler
    uses more registers, too, and loads more before it multiplies.
    """

    step: int = 0
    warps: int = 0
    vector: int = 4
    unrolled: int = 0
    splits: int = 1
    registers: int = 0

    def step_for(self, blocks: int) -> int:
        return min(self.step or 64, next_power_of_two(blocks))

    def float_step_for(self, blocks: int, tokens: int) -> int:
        """As `step_for`, for weights in float32: a block is 32 words for each token, and too many registers
        take minutes to compile.
        """
        step = self.step_for(blocks)
        return max(min(step, FEW_BLOCKS), previous_power_of_two(step // tokens))

    def warps_for(self, blocks: int) -> int:
        return self.warps or max(1, self.step_for(blocks) // 16)


@dataclass(frozen=True)
class TensorShape:
    """The tile config of products on tensor cores: rows and warps of a program; `vector`: adjacent blocks per
    thread; unrolled: 1 if an iteration has code for several chunks of blocks, and loads the next ahead;
    registers: as of `Shape`. A kernel with 0 rows uses no tensor cores.
    """

    rows: int = 0
    warps: int = 0
    vector: int = 0
    unrolled: int = 0
    registers: int = 0

    def groups_for(self, rows: int) -> int:
        """Groups of sixteen rows of a program, of a matrix with a number of rows that must be a multiple."""
        fitting = min(self.rows, rows & -rows)
        return max(1, fitting // 16)


MAX_VECTOR_TOKENS = 8
"""Maximum number of tokens of a product without tensor cores; more take several launches."""
MAX_ROW_SPLITS = 16
"""Maximum number of programs that share rows, times columns of their sums: the step's buffer holds them."""
NARROW_PROGRAMS = 1.5
"""Sixteen rows of the hidden states for each multiprocessor, up to which programs share rows in steps of
several tokens: else many multiprocessors have one program, and some two.
"""
MIN_TENSOR_TOKENS = 5
"""Minimum number of tokens of a step whose products may use tensor cores."""
RowKernel = Literal["qkv", "output", "gated", "down", "head"]
"""The role of a matrix; `output` and `down` add to the hidden states, the others read them."""


@dataclass(frozen=True)
class RowShapes:
    """The tile configs of the kernels without tensor cores, for some number of tokens."""

    qkv: Shape
    output: Shape
    gated: Shape
    down: Shape
    head: Shape

    def of(self, kernel: RowKernel) -> Shape:
        shape: Shape = getattr(self, kernel)
        return shape


@dataclass(frozen=True)
class TensorShapes:
    """The tile configs of the kernels on tensor cores, for some number of tokens."""

    qkv: TensorShape = TensorShape()
    output: TensorShape = TensorShape()
    gated: TensorShape = TensorShape()
    down: TensorShape = TensorShape()
    head: TensorShape = TensorShape()

    def of(self, kernel: RowKernel) -> TensorShape:
        shape: TensorShape = getattr(self, kernel)
        return shape


@dataclass(frozen=True)
class Tuning:
    """The tile configs of a step's kernels; the defaults were best or nearly best for models of 4 and 8
    billion weights on an H100 and an H200. Limits of registers are those with which no kernel of usual types
    spills.
    """

    one: RowShapes = RowShapes(
        qkv=Shape(registers=168),
        output=Shape(128, 8, registers=128),
        gated=Shape(),
        down=Shape(),
        head=Shape(128, 8, registers=128),
    )
    two: RowShapes = RowShapes(
        qkv=Shape(32, 4, 2, 1, registers=168),
        output=Shape(64, 8, 1, 1, registers=128),
        gated=Shape(32, 4, 1, 1),
        down=Shape(64, 8, 1, 8),
        head=Shape(32, 4, 1, 1, registers=168),
    )
    four: RowShapes = RowShapes(
        qkv=Shape(32, 4, 1, registers=168),
        output=Shape(64, 4, 2),
        gated=Shape(32, 4, 1),
        down=Shape(64, 4, 2),
        head=Shape(32, 4, 1),
    )
    """For three or four tokens."""
    eight: RowShapes = RowShapes(
        qkv=Shape(32, 4, 1),
        output=Shape(32, 4, 1),
        gated=Shape(32, 4, 1),
        down=Shape(32, 4, 1),
        head=Shape(32, 4, 1),
    )
    """For more tokens without tensor cores."""
    tensor_eight: TensorShapes = TensorShapes(
        gated=TensorShape(16, 2, 2),
        down=TensorShape(16, 8, 2, 1, registers=128),
        head=TensorShape(16, 2, 2),
    )
    """For five to eight tokens, which are padded to eight. The instructions for a weight in Q4_0 on sm_90 are
    2.9, without tensor cores 5.1.
    """
    tensor_sixteen: TensorShapes = TensorShapes(
        qkv=TensorShape(16, 4, 2, 1),
        output=TensorShape(16, 8, 2, 1),
        gated=TensorShape(16, 4, 2, 1),
        down=TensorShape(16, 4, 2, 1),
        head=TensorShape(16, 2, 2),
    )
    """For more tokens, which are padded to sixteen."""
    splits: int = MAX_SPLITS
    """Maximum number of KV splits."""
    positions: int = 32
    attention_warps: int = 2

    def rows(self, tokens: int) -> RowShapes:
        """The tile configs without tensor cores of a step of `tokens` tokens."""
        shapes: RowShapes = getattr(self, row_shapes_name(tokens))
        return shapes

    def with_row_shape(self, tokens: int, kernel: RowKernel, shape: Shape) -> "Tuning":
        """This tuning with another tile config of a kernel in steps of `tokens` tokens."""
        shapes = replace(self.rows(tokens), **{kernel: shape})
        return self.replace(**{row_shapes_name(tokens): shapes})

    def with_tensor_shape(self, tokens: int, kernel: RowKernel, shape: TensorShape) -> "Tuning":
        """This tuning with another tile config of a kernel on tensor cores in steps of `tokens` tokens."""
        name = _tensor_shapes_name(tokens)
        return self.replace(**{name: replace(getattr(self, name), **{kernel: shape})})

    def tensor_shape(
        self, kernel: RowKernel, tokens: int, matrices: Sequence[PlaneShapes]
    ) -> TensorShape | None:
        """The tile config of products on tensor cores; None: these use none."""
        if tokens < MIN_TENSOR_TOKENS or any(each.tile.code in FLOAT_CODES for each in matrices):
            return None
        shape: TensorShape = getattr(self, _tensor_shapes_name(tokens)).of(kernel)
        return shape if shape.rows else None

    def token_parts(
        self, kernel: RowKernel, tokens: int, matrices: Sequence[PlaneShapes]
    ) -> list[tuple[int, int]]:
        """The launches that multiply the tokens of a step: the first token and the number of each."""
        if tokens <= MAX_VECTOR_TOKENS or self.tensor_shape(kernel, tokens, matrices) is not None:
            return [(0, tokens)]
        firsts = range(0, tokens, MAX_VECTOR_TOKENS)
        return [(first, min(MAX_VECTOR_TOKENS, tokens - first)) for first in firsts]

    def gemv(
        self,
        kernel: RowKernel,
        tokens: int,
        matrices: Sequence[PlaneShapes],
        rows: int = 0,
        splits: bool = False,
    ) -> tuple[GemvConfig, dict[str, int]]:
        """The tile config of a launch that multiplies these matrices, and the `warps` and `registers` of its
        programs. `rows`: the rows of a program divide it as well; `splits`: several programs may share rows.
        """
        blocks = matrices[0].blocks
        tensor = self.tensor_shape(kernel, tokens, matrices)
        if tensor is not None:
            counts = [each.padded_rows for each in matrices]
            groups = min(tensor.groups_for(count) for count in [*counts, *([rows] if rows else [])])
            warps = min(tensor.warps, max(1, next_power_of_two(blocks) // (4 * tensor.vector)))
            config = GemvConfig(0, tensor.vector, tokens, groups, warps, tensor.unrolled)
            return config, {"warps": warps, "registers": tensor.registers}
        return self.vector_gemv(kernel, tokens, matrices, splits)

    def vector_gemv(
        self, kernel: RowKernel, tokens: int, matrices: Sequence[PlaneShapes], splits: bool = False
    ) -> tuple[GemvConfig, dict[str, int]]:
        """As `gemv`, without tensor cores."""
        shape = self.rows(tokens).of(kernel)
        parts = min(shape.splits, MAX_ROW_SPLITS // next_power_of_two(tokens)) if splits else 1
        blocks = matrices[0].blocks // parts
        is_float = any(each.tile.code == Code.SINGLE for each in matrices)
        step = shape.float_step_for(blocks, tokens) if is_float else shape.step_for(blocks)
        is_quantized = not any(each.tile.code in FLOAT_CODES for each in matrices)
        # Others need more registers, and minutes to compile code for whole rows.
        unrolled = shape.unrolled if is_quantized else min(shape.unrolled, 1)
        registers = shape.registers if is_quantized else 0
        gemv = GemvConfig(step, min(shape.vector, step), tokens, 1, 0, unrolled, parts)
        return gemv, {"warps": shape.warps_for(blocks), "registers": registers}

    def splits_for(self, positions: int) -> int:
        """Number of KV splits for a cache with this many positions."""
        return min(self.splits, max(FEW_SPLITS, next_power_of_two(positions // MIN_SPLIT_POSITIONS)))

    def replace(self, **changes: Any) -> "Tuning":
        return replace(self, **changes)


NARROW: Sequence[tuple[int, RowKernel, Shape]] = (
    (2, "down", Shape(32, 4, 1, 1, 4)),
    (4, "output", Shape(64, 4, 2, 0, 2, 168)),
    (4, "down", Shape(32, 4, 1, 8, 2, 168)),
    (8, "output", Shape(32, 4, 1, 0, 2, 168)),
)
"""Other tile configs of narrow models, by tokens and kernel."""
NARROW_UNEVEN: Sequence[tuple[int, RowKernel, Shape]] = (
    (1, "head", Shape(32, 4)),
    (2, "gated", Shape(16, 4, 1, 1)),
    (2, "head", Shape(16, 2, 1, 1, 1, 168)),
    (4, "gated", Shape(16, 4, 1, 8, 1, 168)),
    (4, "head", Shape(16, 2, 1, 1)),
)
"""Those of narrow models whose rows aren't multiples of 32 blocks."""


def row_shapes_name(tokens: int) -> str:
    """The attribute of a `Tuning` with the `RowShapes` for this number of tokens."""
    if tokens <= 2:
        return "one" if tokens == 1 else "two"
    return "four" if tokens <= 4 else "eight"


def _tensor_shapes_name(tokens: int) -> str:
    """The attribute of a `Tuning` with the `TensorShapes` for this number of tokens."""
    return "tensor_eight" if tokens <= MAX_VECTOR_TOKENS else "tensor_sixteen"


def usual_tuning(capability: int, width: int = 0, multiprocessors: int = 0) -> Tuning:
    """The default tile configs for a GPU and hidden states of this width; 0: any. `capability`: ten times its
    compute capability.

    Below 80, a tensor core operation has half the depth, and a thread holds more of a tile: the tiles of
    other GPUs would spill kilobytes. 0: interpreted kernels.
    """
    if capability >= 80:
        tuning = Tuning()
        is_narrow, blocks = (
            0 < width <= NARROW_PROGRAMS * ROW_MULTIPLE * multiprocessors,
            padded_blocks(width),
        )
        changes = list[tuple[int, RowKernel, Shape]]()
        if is_narrow:
            changes += NARROW
            tuning = tuning.with_tensor_shape(8, "down", TensorShape(16, 8, 2, 1))
        if 0 < blocks % 64 <= 32:  # With steps of 64 blocks, half of the last one is padding.
            changes.append((1, "gated", Shape(32, 2)))
        if is_narrow and blocks % 32:  # So it is with steps of 32, and most of one of 128.
            changes += NARROW_UNEVEN
        for change in changes:
            tuning = tuning.with_row_shape(*change)
        return tuning
    tuning = Tuning(positions=16, attention_warps=4)
    if not capability:
        return tuning
    return tuning.replace(tensor_eight=TensorShapes(), tensor_sixteen=TensorShapes())
