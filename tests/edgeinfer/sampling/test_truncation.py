"""Each truncating sampler on vectors small enough to work out by hand, and against a sorted reference."""

import numpy as np
import numpy.typing as npt
import pytest

from edgeinfer.sampling import chain
from edgeinfer.sampling.candidates import highest, softmax

Logits = npt.NDArray[np.float32]


def logits_of(*probabilities: float) -> Logits:
    with np.errstate(divide="ignore"):
        return np.log(np.array(probabilities, dtype=np.float32))


@pytest.mark.parametrize(
    ("k", "expected"),
    [(1, [3]), (2, [1, 3]), (3, [1, 2, 3]), (4, [0, 1, 2, 3]), (9, [0, 1, 2, 3]), (0, [0, 1, 2, 3])],
)
def test_top_k_keeps_the_highest(k: int, expected: list[int]) -> None:
    assert chain.top_k(logits_of(0.1, 0.25, 0.2, 0.45), k).tolist() == expected


def test_top_k_keeps_the_lowest_ids_among_equals() -> None:
    assert chain.top_k(np.zeros(20_000, dtype=np.float32), 3).tolist() == [0, 1, 2]
    assert chain.top_k(np.array([1, 2, 1, 2, 1], dtype=np.float32), 3).tolist() == [0, 1, 3]


@pytest.mark.parametrize(
    ("share", "expected"),
    [(0.0, [3]), (0.4, [3]), (0.5, [1, 3]), (0.75, [1, 2, 3]), (0.95, [0, 1, 2, 3]), (1.0, [0, 1, 2, 3])],
)
def test_top_p_keeps_the_fewest_that_reach_the_share(share: float, expected: list[int]) -> None:
    assert chain.top_p(logits_of(0.1, 0.25, 0.2, 0.45), share).tolist() == expected


@pytest.mark.parametrize(
    ("ratio", "expected"),
    [(0.0, [0, 1, 2, 3]), (0.24, [0, 1, 2, 3]), (0.26, [0, 1, 3]), (0.6, [0, 3]), (0.8, [3]), (1.0, [3])],
)
def test_min_p_measures_against_the_best(ratio: float, expected: list[int]) -> None:
    assert chain.min_p(logits_of(0.3, 0.2, 0.1, 0.4), ratio).tolist() == expected


def test_min_p_of_one_keeps_all_that_share_the_peak() -> None:
    assert chain.min_p(logits_of(0.4, 0.2, 0.4), 1.0).tolist() == [0, 2]


def test_typical_prefers_the_expected_over_the_most_probable() -> None:
    # Entropy 1.33 nats: 0.2 (1.61 nats) is closer to it than 0.4 (0.92).
    assert chain.typical(logits_of(0.4, 0.2, 0.2, 0.2), 0.5).tolist() == [1, 2, 3]
    assert chain.typical(logits_of(0.94, 0.02, 0.02, 0.02), 0.5).tolist() == [0]


def test_typical_keeps_at_least_one_and_accepts_impossible_candidates() -> None:
    assert chain.typical(logits_of(0.0, 0.5, 0.5, 0.0), 0.0).tolist() == [1]
    assert chain.typical(logits_of(0.0, 0.5, 0.5, 0.0), 0.7).tolist() == [1, 2]


@pytest.mark.parametrize(
    ("threshold", "expected"),
    [(0.08, [3]), (0.15, [2, 3]), (0.25, [1, 2, 3]), (0.36, [0, 1, 2, 3]), (0.6, [0, 1, 2, 3])],
)
def test_xtc_keeps_the_least_probable_above_the_threshold(threshold: float, expected: list[int]) -> None:
    assert chain.xtc_kept(logits_of(0.4, 0.3, 0.2, 0.1), threshold).tolist() == expected


def test_xtc_works_on_unsorted_candidates() -> None:
    assert chain.xtc_kept(logits_of(0.1, 0.4, 0.2, 0.3), 0.15).tolist() == [0, 2]


@pytest.mark.default_cases
@pytest.mark.parametrize("size", [1, 63, 2047, 8192, 16_385, 50_257])
@pytest.mark.parametrize("count", [1, 40, 200, 600])
def test_highest_equals_a_stable_sort(size: int, count: int) -> None:
    keys = np.random.default_rng(size).integers(-50, 50, size).astype(np.float32)
    expected = np.argsort(-keys, kind="stable")[:count]
    assert highest(keys, count).tolist() == expected.tolist()


@pytest.mark.default_cases
@pytest.mark.parametrize("spread", [0.01, 1.0, 8.0, 100.0])
@pytest.mark.parametrize("share", [0.0, 0.1, 0.9, 0.999])
@pytest.mark.parametrize("size", [40, chain.FEW, 9_001])
def test_top_p_equals_a_sorted_reference(spread: float, share: float, size: int) -> None:
    logits = (np.random.default_rng(3).standard_normal(size) * spread).astype(np.float32)
    probabilities = softmax(logits)
    order = np.argsort(-logits, kind="stable")
    needed = int(np.searchsorted(np.cumsum(probabilities[order]), share)) + 1
    assert chain.top_p(logits, share).tolist() == sorted(order[:needed].tolist())


@pytest.mark.parametrize("share", [0.2, 0.9])
@pytest.mark.parametrize("size", [40, chain.FEW, 9_001])
def test_typical_equals_a_sorted_reference(share: float, size: int) -> None:
    logits = (np.random.default_rng(4).standard_normal(size) * 3).astype(np.float32)
    probabilities = softmax(logits)
    distance = np.abs(-np.log(probabilities) - np.sum(probabilities * -np.log(probabilities)))
    order = np.argsort(distance, kind="stable")
    needed = int(np.searchsorted(np.cumsum(probabilities[order]), share, side="right")) + 1
    assert chain.typical(logits, share).tolist() == sorted(order[:needed].tolist())
