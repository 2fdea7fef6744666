"""GEMV kernels of every format and instruction set against float64 products of the decoded weights."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from edgeinfer_kernels.cpu.compiler.kernel_cache import Kernels
from edgeinfer_kernels.cpu.layout.fields import FIELDS
from edgeinfer_kernels.cpu.layout.packed_matrix import (
    UnsupportedFormatError,
    interleave,
    interleaved_bytes,
    kernel_format,
)
from edgeinfer_kernels.cpu.runtime.abi import PANEL_TOKENS
from edgeinfer_kernels.matrix import Matrix
from edgeinfer_quant_formats import FORMATS, block_format
from tests.kernels.conftest import BEST, ISA_NAMES, TILE_ISAS, best_formats, isas_and_formats
from tests.kernels.row_matrices import FLOATS, multiply, multiply_by_tiles, random_matrix

FORMAT_NAMES = [*FIELDS, "TQ1_0"]
QUANTIZED = [name for name in FORMAT_NAMES if name not in FLOATS]
SHAPES = [
    (63, 2),
    *(pytest.param(*shape, marks=pytest.mark.slow) for shape in [(1, 1), (16, 1), (111, 1), (320, 8)]),
]
"""(rows, blocks of 256 or steps of 44 columns)."""
TOKENS = [1, 2, 5, 7, 8, 33]


def columns_for(name: str, blocks: int) -> int:
    return 44 * blocks if name in FLOATS else 256 * blocks


def relative(actual: npt.NDArray[np.floating], expected: npt.NDArray[np.floating]) -> float:
    return float(np.linalg.norm(actual - expected)) / max(float(np.linalg.norm(expected)), 1e-30)


@pytest.mark.parametrize(("isa", "name"), isas_and_formats(ISA_NAMES, FORMAT_NAMES))
@pytest.mark.parametrize(("rows", "blocks"), SHAPES)
def test_rows_times_activations_equal_the_decoded_weights(
    kernels_for: Callable[[str, str], Kernels], isa: str, name: str, rows: int, blocks: int
) -> None:
    kernels, random = kernels_for(isa, name), np.random.default_rng(1)
    matrix = random_matrix(name, rows, columns_for(name, blocks))
    x = random.standard_normal((max(TOKENS), matrix.columns)).astype(np.float32)
    alone, _ = multiply(kernels, matrix, x[:1])
    for tokens in TOKENS:
        actual, expected = multiply(kernels, matrix, x[:tokens])
        assert relative(actual, expected) < 5e-6, tokens
        assert np.array_equal(actual[:1], alone), tokens


@pytest.mark.parametrize(("isa", "name"), isas_and_formats(ISA_NAMES, QUANTIZED))
def test_random_bits_of_codes_equal_the_decoded_weights(
    kernels_for: Callable[[str, str], Kernels], isa: str, name: str
) -> None:
    random, form = np.random.default_rng(2), block_format(name)
    matrix = random_matrix(name, 32, 512)
    scales = random_matrix(name, 32, 512).raw.reshape(32, -1, form.block_bytes)
    raw = random.integers(0, 256, scales.shape, dtype=np.uint8)
    field = form.scales
    if field is not None:
        float_bytes = slice(field.offset, field.offset + field.unit * field.count)
        raw[..., float_bytes] = scales[..., float_bytes]
    matrix = Matrix(name, name, 32, 512, raw.reshape(32, -1))
    actual, expected = multiply(
        kernels_for(isa, name), matrix, random.standard_normal((2, 512)).astype(np.float32)
    )
    assert relative(actual, expected) < 2e-6


@pytest.mark.parametrize(("isa", "name"), isas_and_formats(TILE_ISAS, QUANTIZED))
def test_amx_rounds_only_weights_and_activations_to_bfloat16(
    kernels_for: Callable[[str, str], Kernels], isa: str, name: str
) -> None:
    kernels, random = kernels_for(isa, name), np.random.default_rng(4)
    for rows, blocks in [(1, 1), (63, 3), (144, 1)]:
        matrix = random_matrix(name, rows, 256 * blocks)
        for tokens in [1, 16, 50]:
            x = random.standard_normal((tokens, matrix.columns)).astype(np.float32)
            actual, expected = multiply_by_tiles(kernels, matrix, x)
            assert relative(actual, expected) < 3e-4, (rows, blocks, tokens)


@pytest.mark.parametrize("isa", TILE_ISAS)
def test_more_tokens_than_a_panel_are_multiplied_panel_by_panel(
    kernels_for: Callable[[str, str], Kernels], isa: str
) -> None:
    matrix = random_matrix("Q4_K", 32, 256)
    x = np.random.default_rng(5).standard_normal((PANEL_TOKENS + 17, 256)).astype(np.float32)
    actual, expected = multiply_by_tiles(kernels_for(isa, "Q4_K"), matrix, x)
    assert relative(actual, expected) < 3e-4


@pytest.mark.parametrize("name", best_formats(FORMAT_NAMES))
@pytest.mark.parametrize("scale", [1e-4, 1e3])
def test_extreme_scales_and_zeros_stay_exact(
    kernels_for: Callable[[str, str], Kernels], name: str, scale: float
) -> None:
    matrix = random_matrix(name, 48, columns_for(name, 1), scale)
    x = np.random.default_rng(3).standard_normal((3, matrix.columns)).astype(np.float32) / scale
    x[1] = 0
    actual, expected = multiply(kernels_for(BEST, name), matrix, x)
    assert relative(actual, expected) < 2e-6
    assert not actual[1].any()


def test_a_float_row_that_is_no_multiple_of_four_is_padded(kernels: Kernels) -> None:
    for columns in (1, 7, 63, 111):
        matrix = random_matrix("F16", 5, columns)
        actual, expected = multiply(kernels, matrix, np.ones((1, columns), np.float32))
        assert relative(actual, expected) < 2e-6


@pytest.mark.parametrize("name", FORMAT_NAMES)
def test_interleaved_rows_have_the_bytes_of_whole_groups(kernels: Kernels, name: str) -> None:
    matrix = random_matrix(name, 33, 512)
    form = block_format(kernel_format(matrix))
    assert interleaved_bytes(matrix) == 48 * form.row_bytes(512)
    assert interleave(matrix, kernels).nbytes >= interleaved_bytes(matrix)


def test_fields_cover_every_block_without_gaps() -> None:
    for name, fields in FIELDS.items():
        ends = [field.offset + field.unit * field.count for field in fields]
        assert [field.offset for field in fields] == [0, *ends[:-1]], name
        assert ends[-1] == block_format(name).block_bytes, name


def test_a_format_without_a_kernel_is_named() -> None:
    name = next(name for name in FORMATS if name not in FORMAT_NAMES)
    matrix = Matrix("blk.0.ffn_up.weight", name, 1, 1, np.zeros((1, 8), np.uint8))
    with pytest.raises(UnsupportedFormatError, match=rf"blk\.0\.ffn_up\.weight: no CPU kernel for {name}"):
        kernel_format(matrix)
