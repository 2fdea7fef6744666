"""The best tokens of rows are those of numpy: the first of equals; none if a logit is invalid."""

from collections.abc import Callable, Iterator
from ctypes import addressof

import numpy as np
import numpy.typing as npt
import pytest

from edgeinfer_kernels.caches.layer_cache import padded
from edgeinfer_kernels.cpu.compiler.kernel_cache import Kernels
from edgeinfer_kernels.cpu.layout.packed_matrix import float_rows
from edgeinfer_kernels.cpu.runtime.abi import LOGITS_PER_PART, STEP_TOKENS
from edgeinfer_kernels.cpu.runtime.kernel_args import StepArgs
from edgeinfer_kernels.cpu.runtime.schedule import BestTokens
from edgeinfer_kernels.cpu.runtime.thread_pool import ThreadPool

Floats = npt.NDArray[np.float32]
Finder = Callable[[Floats, float], list[int]]


@pytest.fixture(params=[1, 2, 5])
def found(request: pytest.FixtureRequest, kernels: Kernels) -> Iterator[Finder]:
    """Finds the best tokens of rows of logits."""
    pool = ThreadPool(kernels, request.param)

    def find(logits: Floats, scale: float = 1.0) -> list[int]:
        count, vocabulary = logits.shape
        best = BestTokens(vocabulary, scale)
        rows = float_rows(best.logits, STEP_TOKENS, padded(vocabulary))
        rows[:] = np.nan
        rows[:count, :vocabulary] = logits
        step = StepArgs(tokens=count)
        pool.run(kernels.address("best_tokens_block"), best.block, addressof(step))
        return best.first(count)

    yield find
    pool.close()


@pytest.mark.default_cases
@pytest.mark.parametrize("vocabulary", [1, 15, 63, 111, LOGITS_PER_PART, 8192, 4 * LOGITS_PER_PART + 17])
@pytest.mark.parametrize("rows", [1, 4, STEP_TOKENS])
def test_they_are_those_of_numpy(found: Finder, vocabulary: int, rows: int) -> None:
    logits = np.random.default_rng(rows).normal(size=(rows, vocabulary)).astype(np.float32)
    assert found(logits, 1.0) == logits.argmax(axis=1).tolist()
    assert found(logits - 100, 1.0) == logits.argmax(axis=1).tolist()


def test_the_first_of_equals_is_found(found: Finder) -> None:
    rng = np.random.default_rng(3)
    logits = rng.integers(-3, 3, (STEP_TOKENS, 3000)).astype(np.float32)
    assert found(logits, 1.0) == logits.argmax(axis=1).tolist()
    zeros = np.zeros((2, 40), np.float32)
    zeros[0, ::2] = -0.0
    assert found(zeros, 1.0) == [0, 0]


def test_logits_that_a_scale_makes_equal_are_equals(found: Finder) -> None:
    logits = np.full((1, 100), 0.25, np.float32)
    logits[0, 60] = np.nextafter(logits[0, 60], np.float32(1))
    scale = np.float32(2**-147)  # adjacent numbers become the same one
    assert (logits * scale).argmax() == 0
    assert found(logits, float(scale)) == [0]
    assert found(logits, 0.3) == [int((logits * np.float32(0.3)).argmax())]


@pytest.mark.default_cases
@pytest.mark.parametrize("invalid", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("index", [0, 17, 2047, 2500])
def test_rows_with_an_invalid_logit_have_none(found: Finder, invalid: float, index: int) -> None:
    logits = np.random.default_rng(1).normal(size=(3, 2501)).astype(np.float32)
    logits[1, index] = invalid
    assert found(logits, 1.0) == [int(logits[0].argmax()), -1, int(logits[2].argmax())]


@pytest.mark.parametrize("size", [1e-38, 1e37])
def test_extreme_logits_are_compared_too(found: Finder, size: float) -> None:
    logits = (np.random.default_rng(2).uniform(-3, 3, (4, 500)) * size).astype(np.float32)
    expected = logits.argmax(axis=1).tolist()
    assert found(logits, 1.0) == expected
