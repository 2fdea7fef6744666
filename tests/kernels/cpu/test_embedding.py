"""Rows of the embedding by the kernels' decoder, bit for bit as the codecs decode them."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from edgeinfer_kernels.cpu.compiler.kernel_cache import Kernels
from edgeinfer_kernels.cpu.embedding import Embedding, Scratch, embedding_scratch
from edgeinfer_kernels.cpu.layout.fields import FIELDS
from edgeinfer_kernels.cpu.layout.packed_matrix import Arena, address
from edgeinfer_kernels.cpu.runtime.abi import STEP_TOKENS
from edgeinfer_kernels.cpu.runtime.thread_pool import ThreadPool
from edgeinfer_kernels.matrix import Matrix
from tests.kernels.conftest import BEST, ISA_NAMES, best_formats, isas_and_formats
from tests.kernels.row_matrices import FLOATS, random_matrix

Floats = npt.NDArray[np.float32]
THREADS = 2
QUANTIZED = [name for name in FIELDS if name not in FLOATS]


def write(matrix: Matrix, kernels: Kernels, ids: list[int], x: Floats, scale: float = 1.0) -> None:
    arena, pool, stride = Arena(), ThreadPool(kernels, THREADS), embedding_scratch(matrix)
    scratch = np.empty(THREADS * stride, np.uint8)
    Embedding(matrix, arena, kernels, pool, Scratch(address(scratch), stride), scale).write(ids, x)
    pool.close()
    arena.clear()


def written(matrix: Matrix, kernels: Kernels, ids: list[int], scale: float = 1.0) -> Floats:
    x = np.full((len(ids), matrix.columns), np.nan, np.float32)
    write(matrix, kernels, ids, x, scale)
    return x


@pytest.mark.parametrize(("isa", "name"), isas_and_formats(ISA_NAMES, QUANTIZED))
def test_a_row_is_decoded_to_the_bits_of_the_codec(
    kernels_for: Callable[[str, str], Kernels], isa: str, name: str
) -> None:
    kernels = kernels_for(isa, name)
    assert kernels.find(f"decode_{name}")
    for columns in (256, 1280):
        matrix = random_matrix(name, 5, columns, scale=0.02)
        for row in range(5):
            expected = matrix.decoded()[row : row + 1]
            np.testing.assert_array_equal(
                written(matrix, kernels, [row]).view(np.uint32), expected.view(np.uint32)
            )


@pytest.mark.parametrize("name", best_formats(QUANTIZED))
def test_random_bits_of_a_row_decode_as_in_the_codec(
    kernels_for: Callable[[str, str], Kernels], name: str
) -> None:
    kernels = kernels_for(BEST, name)
    whole = random_matrix(name, 64, 512)
    raw = np.random.default_rng(3).integers(0, 256, whole.raw.shape, dtype=np.uint8)
    matrix = Matrix(whole.name, name, 64, 512, raw)
    with np.errstate(all="ignore"):
        expected = matrix.decoded()
    for row in range(64):
        np.testing.assert_array_equal(written(matrix, kernels, [row])[0], expected[row])


@pytest.mark.parametrize("name", [*FLOATS, "TQ1_0"])
def test_formats_without_a_decoder_use_the_codec(kernels: Kernels, name: str) -> None:
    matrix = random_matrix(name, 3, 256)
    np.testing.assert_array_equal(written(matrix, kernels, [2])[0], matrix.decoded()[2])


def test_several_rows_are_in_the_order_of_their_ids(kernels: Kernels) -> None:
    matrix = random_matrix("Q4_K", 9, 256)
    np.testing.assert_array_equal(written(matrix, kernels, [7, 0, 7]), matrix.decoded()[[7, 0, 7]])


@pytest.mark.parametrize("name", ["Q4_K", "F16"])
def test_rows_are_written_to_a_strided_array(kernels: Kernels, name: str) -> None:
    matrix, out = random_matrix(name, 9, 256), np.full((3, 300), np.nan, np.float32)
    x = out[:, :256]
    write(matrix, kernels, [4, 8, 0], x)
    np.testing.assert_array_equal(x, matrix.decoded()[[4, 8, 0]])
    assert np.isnan(out[:, 256:]).all()


@pytest.mark.parametrize("name", ["Q4_K", "F16"])
@pytest.mark.parametrize("count", [1, STEP_TOKENS, STEP_TOKENS + 1, 70])
def test_scaled_rows_do_not_depend_on_the_thread_count(kernels: Kernels, name: str, count: int) -> None:
    matrix, ids = random_matrix(name, 9, 512), [index * index % 9 for index in range(count)]
    expected = matrix.decoded()[ids] * np.float32(7.5)
    np.testing.assert_array_equal(written(matrix, kernels, ids, 7.5), expected)


@pytest.mark.parametrize("row", [-1, 9])
def test_a_row_beyond_the_matrix_is_refused(kernels: Kernels, row: int) -> None:
    with pytest.raises(IndexError, match=rf"Q4_K.weight: row {row}, wanted 0 to 8"):
        written(random_matrix("Q4_K", 9, 256), kernels, [row])
