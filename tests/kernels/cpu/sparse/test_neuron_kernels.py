"""The kernels of single neurons equal the matmul for every format, and read no inactive neuron."""

from ctypes import addressof
from functools import cache

import numpy as np
import numpy.typing as npt
import pytest

from edgeinfer_kernels.cpu.compiler.kernel_cache import Kernels
from edgeinfer_kernels.cpu.compiler.kernel_units import sparse_units
from edgeinfer_kernels.cpu.layout.neuron_layout import (
    NEURON_FORMATS,
    ColumnLayout,
    lay_out_columns,
    lay_out_rows,
    neuron_row_bytes,
    row_groups,
)
from edgeinfer_kernels.cpu.layout.packed_matrix import address
from edgeinfer_kernels.cpu.runtime.abi import (
    ACTIVATION_BYTES,
    NEURONS_PER_BLOCK,
    ROWS_AHEAD,
    SUMS_SCRATCH,
    lane_activations_bytes,
)
from edgeinfer_kernels.cpu.runtime.block_args import NeuronColumnsArgs
from edgeinfer_kernels.cpu.runtime.structure import field_types
from edgeinfer_kernels.matrix import Matrix
from edgeinfer_kernels.pages import allocate
from tests.kernels.conftest import BEST, ISA_NAMES, best_formats, built_kernels, isas_and_formats
from tests.kernels.row_matrices import activation_blocks, quantized_rows, random_matrix

Rows = npt.NDArray[np.float32]


@cache
def sparse_kernels(isa: str, name: str) -> Kernels:
    return built_kernels(isa, sparse_units([name]))


def by_lanes(quantized: npt.NDArray[np.uint8], blocks: int) -> npt.NDArray[np.uint32]:
    """A token's blocks of activations, sixteen interleaved by words; zeros after the last."""
    words = np.zeros((-(-blocks // 16) * 16, ACTIVATION_BYTES // 4), np.uint32)
    words[:blocks] = quantized.view(np.uint32).reshape(blocks, -1)
    return np.ascontiguousarray(words.reshape(-1, 16, ACTIVATION_BYTES // 4).swapaxes(1, 2))


def neuron_rows(
    kernels: Kernels, matrix: Matrix, quantized: npt.NDArray[np.uint8], expected: list[int]
) -> Rows:
    """The products of the requested rows, NaN elsewhere."""
    laid_out, lanes = lay_out_rows(matrix, kernels), by_lanes(quantized, matrix.columns // 32)
    assert lanes.nbytes == lane_activations_bytes(matrix.columns)
    assert laid_out.nbytes - 4096 == matrix.rows * neuron_row_bytes(matrix)
    neurons, out = (
        np.array([*expected, *[0] * ROWS_AHEAD], np.int32),
        np.full(matrix.rows, np.nan, np.float32),
    )
    kernels.function(f"neuron_rows_{matrix.format}", 10)(
        address(laid_out),
        row_groups(matrix.columns),
        neuron_row_bytes(matrix),
        0,
        address(neurons),
        len(expected),
        address(lanes),
        address(out),
        address(laid_out),
        neuron_row_bytes(matrix),
    )
    return out


def neuron_sums(
    kernels: Kernels,
    matrix: Matrix,
    quantized: npt.NDArray[np.uint8],
    part: tuple[int, int] = (0, 1),
    by_outputs: int = 0,
    laid_out: npt.NDArray[np.uint8] | None = None,
) -> Rows:
    """matrix · x by neurons, (tokens, outputs); of one of some parts of the neurons."""
    layout = ColumnLayout.of(matrix)
    laid_out = lay_out_columns(matrix) if laid_out is None else laid_out
    assert laid_out.nbytes - 4096 == layout.nbytes
    names = [name for name in field_types(NeuronColumnsArgs) if hasattr(layout, name)]
    columns = NeuronColumnsArgs(weights=address(laid_out), **{name: getattr(layout, name) for name in names})
    blocks = quantized[:, : layout.blocks * ACTIVATION_BYTES].reshape(len(quantized), -1, ACTIVATION_BYTES)
    counts = np.count_nonzero(blocks[:, :, :NEURONS_PER_BLOCK], axis=2).astype(np.uint8)
    columns.counts, columns.counts_stride = address(counts), counts.strides[0]
    out, scratch = (
        np.full((len(quantized), layout.outputs), np.nan, np.float32),
        allocate(SUMS_SCRATCH + 4 * layout.blocks * len(quantized)),
    )
    kernels.function(f"neuron_sums_{matrix.format}", 10)(
        addressof(columns),
        *part,
        address(quantized),
        quantized.strides[0],
        len(quantized),
        address(out),
        out.strides[0],
        address(scratch),
        by_outputs,
    )
    return out[:, : matrix.rows]


@pytest.mark.default_cases
@pytest.mark.parametrize(("isa", "name"), isas_and_formats(ISA_NAMES, list(NEURON_FORMATS)))
@pytest.mark.parametrize("columns", [256, 512, 1280])
def test_single_rows_equal_the_reference_matmul(isa: str, name: str, columns: int) -> None:
    matrix = random_matrix(name, 63, columns)
    x = np.random.default_rng(2).standard_normal((1, columns)).astype(np.float32)
    quantized, exact = quantized_rows(x)
    requested = [62, 0, 17, 33, 34]
    actual = neuron_rows(sparse_kernels(isa, name), matrix, quantized[0], requested)
    expected = (exact @ matrix.decoded().astype(np.float64).T)[0]
    np.testing.assert_allclose(
        actual[requested], expected[requested], rtol=0, atol=2e-5 * np.abs(expected).max()
    )
    assert np.isnan(np.delete(actual, requested)).all()


@pytest.mark.default_cases
@pytest.mark.parametrize(("isa", "name"), isas_and_formats(ISA_NAMES, list(NEURON_FORMATS)))
@pytest.mark.parametrize(("outputs", "tokens", "active"), [(111, 1, 0.2), (256, 3, 0.5), (128, 2, 1.0)])
def test_sums_of_active_neurons_equal_the_reference_matmul(
    isa: str, name: str, outputs: int, tokens: int, active: float
) -> None:
    random = np.random.default_rng(3)
    matrix = random_matrix(name, outputs, 512)
    x = random.standard_normal((tokens, 512)).astype(np.float32)
    x[random.random(x.shape) >= active] = 0
    x[:, 64:128] = 0  # blocks without any active neuron
    quantized, exact = quantized_rows(x)
    expected = exact @ matrix.decoded().astype(np.float64).T
    actual = neuron_sums(sparse_kernels(isa, name), matrix, quantized)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=2e-5 * np.abs(expected).max())


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_parts_of_the_outputs_are_those_of_all_bit_by_bit(parts: int) -> None:
    matrix, kernels = random_matrix("Q4_0", 256, 512), sparse_kernels(BEST, "Q4_0")
    x = quantized_rows(np.random.default_rng(1).standard_normal((2, 512)).astype(np.float32))[0]
    sums = [neuron_sums(kernels, matrix, x, (part, parts), by_outputs=1) for part in range(parts)]
    assert (np.sum(np.isfinite(sums), axis=0) == 1).all()
    assert np.array_equal(np.nansum(sums, axis=0), neuron_sums(kernels, matrix, x))


@pytest.mark.parametrize("parts", [2, 5, 16, 19])
@pytest.mark.parametrize("name", best_formats(NEURON_FORMATS))
def test_the_sums_of_the_parts_of_the_neurons_are_those_of_all(name: str, parts: int) -> None:
    matrix, kernels = random_matrix(name, 256, 512), sparse_kernels(BEST, name)
    x = quantized_rows(np.random.default_rng(1).standard_normal((2, 512)).astype(np.float32))[0]
    sums = [neuron_sums(kernels, matrix, x, (part, parts)) for part in range(parts)]
    assert sum(not each.any() for each in sums) == max(0, parts - 16)
    np.testing.assert_allclose(np.sum(sums, 0), neuron_sums(kernels, matrix, x), rtol=0, atol=1e-4)


def test_the_part_of_a_token_does_not_depend_on_the_other_tokens() -> None:
    matrix, kernels = random_matrix("Q4_0", 256, 1024), sparse_kernels(BEST, "Q4_0")
    random = np.random.default_rng(4)
    x = random.standard_normal((3, 1024)).astype(np.float32)
    x[random.random(x.shape) > 0.1 * np.arange(1, 4)[:, None]] = 0
    quantized = quantized_rows(x)[0]
    for part in range(5):
        together = neuron_sums(kernels, matrix, quantized, (part, 5))
        alone = [neuron_sums(kernels, matrix, each[None], (part, 5))[0] for each in quantized]
        assert np.array_equal(together, alone)


@pytest.mark.parametrize("name", best_formats(NEURON_FORMATS))
def test_both_layouts_hold_the_values_of_the_file_bit_by_bit(name: str) -> None:
    """One neuron with the activation 1 returns its column; one column with it, that of all rows."""
    random = np.random.default_rng(7)
    kernels = sparse_kernels(BEST, name)
    matrix = random_matrix(name, 128, 512)
    weights = matrix.decoded()
    for column in random.choice(512, 12, replace=False):
        one = np.zeros((1, 512 // 32, 32), np.int8)
        one.flat[column] = 1
        quantized = activation_blocks(one, np.ones(one.shape[:2], np.float32))
        for actual in (
            neuron_sums(kernels, matrix, quantized)[0],
            neuron_rows(kernels, matrix, quantized[0], list(range(128))),
        ):
            assert np.array_equal(actual, weights[:, column])


@pytest.mark.parametrize("name", best_formats(NEURON_FORMATS))
def test_weights_of_inactive_neurons_have_no_effect(name: str) -> None:
    kernels, matrix = sparse_kernels(BEST, name), random_matrix(name, 128, 256)
    x = np.random.default_rng(0).standard_normal((1, 256)).astype(np.float32)
    x[:, ::2] = 0
    quantized, layout = quantized_rows(x)[0], ColumnLayout.of(matrix)
    laid_out = lay_out_columns(matrix)
    expected = neuron_sums(kernels, matrix, quantized, laid_out=laid_out)
    super_blocks = laid_out[: layout.nbytes].reshape(-1, layout.super_bytes)[:, layout.super_factor_bytes :]
    shape = (-1, layout.blocks_per_super, layout.block_bytes)
    blocks = super_blocks.reshape(shape)[:, :, layout.factor_bytes :]
    neurons = blocks.reshape(*blocks.shape[:2], 32, layout.neuron_bytes)
    neurons[:, :, ::2] ^= 255
    assert np.array_equal(expected, neuron_sums(kernels, matrix, quantized, laid_out=laid_out))
    neurons[:, :, 1] ^= 255
    assert not np.array_equal(expected, neuron_sums(kernels, matrix, quantized, laid_out=laid_out))
