"""The shortlist of allowed tokens equals truncation over all allowed tokens."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest

from edgeinfer.sampling import chain
from edgeinfer.sampling.candidates import Floats
from edgeinfer.sampling.shortlist import FIRST_CHECKED, MAX_CHECKED, allowed_shortlist

SIZE = 3000
Ids = npt.NDArray[np.int64]


def truncation(top_k: int, top_p: float, min_p: float) -> Callable[[Floats], Ids]:
    def truncate(logits: Floats) -> Ids:
        ids = chain.top_k(logits, top_k)
        ids = ids[chain.top_p(logits[ids], top_p)] if top_p < 1 else ids
        return ids[chain.min_p(logits[ids], min_p)]

    return truncate


class CountedMask:
    """Whether a token is allowed; counts the calls."""

    def __init__(self, mask: npt.NDArray[np.bool_]) -> None:
        self.mask, self.calls = mask, 0

    def __call__(self, token_id: int) -> bool:
        self.calls += 1
        return bool(self.mask[token_id])


def shortlist(
    logits: npt.NDArray[np.float32], top_k: int, mask: CountedMask, top_p: float, min_p: float
) -> Ids | None:
    return allowed_shortlist(logits, top_k, truncation(top_k, top_p, min_p), mask)


@pytest.mark.default_cases
@pytest.mark.parametrize("top_k", [1, 5, 40, 100])
@pytest.mark.parametrize(("top_p", "min_p"), [(0.95, 0.05), (0.3, 0.0), (1.0, 0.2), (1.0, 0.0), (0.0, 1.0)])
@pytest.mark.parametrize("spread", [0.5, 3.0, 12.0])
def test_shortlist_equals_truncation_of_all_allowed(
    top_k: int, top_p: float, min_p: float, spread: float
) -> None:
    random = np.random.default_rng(7)
    result = few_checks = 0
    for share in (1.0, 0.9, 0.5, 0.2) * 5:
        logits = (spread * random.standard_normal(SIZE)).astype(np.float32)
        mask = CountedMask(random.random(SIZE) < share)
        expected = truncation(top_k, top_p, min_p)(np.where(mask.mask, logits, np.float32(-np.inf)))
        candidates = shortlist(logits, top_k, mask, top_p, min_p)
        assert mask.calls <= MAX_CHECKED
        if candidates is not None:
            np.testing.assert_array_equal(candidates, expected)
            result += 1
            few_checks += mask.calls < top_k
    if top_k <= 40 and (top_p < 1 or min_p > 0):
        assert result >= 5
    if top_k == 40 and spread > 1 and (top_p < 1 or min_p > 0):
        assert few_checks >= 5


def test_equal_logits_are_kept_in_the_order_of_their_ids() -> None:
    random = np.random.default_rng(3)
    result = 0
    for _ in range(200):
        logits = random.integers(0, 4, 64).astype(np.float32)
        mask = CountedMask(random.random(64) < 0.8)
        candidates = shortlist(logits, 20, mask, 0.7, 0.1)
        if candidates is not None:
            masked = np.where(mask.mask, logits, np.float32(-np.inf))
            np.testing.assert_array_equal(candidates, truncation(20, 0.7, 0.1)(masked))
            result += 1
    assert result > 20


def test_few_checks_if_none_of_the_best_is_allowed() -> None:
    logits = np.arange(100, dtype=np.float32)
    mask = CountedMask(logits < 100 - FIRST_CHECKED - 1)
    assert shortlist(logits, 40, mask, 0.95, 0.05) is None
    assert mask.calls == FIRST_CHECKED


def test_one_check_for_a_dominant_token() -> None:
    logits = np.array([0.0, 20.0, 1.0, 2.0], np.float32)
    mask = CountedMask(np.array([False, True, False, False]))
    candidates = shortlist(logits, 3, mask, 0.95, 0.05)
    assert candidates is not None
    assert candidates.tolist() == [1]
    assert mask.calls == 1


def test_tokens_after_the_list_count_if_one_is_disallowed() -> None:
    logits = np.array([4.0, 3.9, 3.8, 3.7], np.float32)
    mask = np.array([True, False, True, True])
    assert shortlist(logits, 3, CountedMask(mask), 1.0, 0.05) is None
    candidates = shortlist(logits, 3, CountedMask(mask), 0.3, 0.05)
    assert candidates is not None
    assert (
        candidates.tolist() == truncation(3, 0.3, 0.05)(np.where(mask, logits, np.float32(-np.inf))).tolist()
    )


def test_a_list_of_the_whole_vocabulary_is_decided() -> None:
    logits = np.array([2.0, 1.0, 0.0], np.float32)
    candidates = shortlist(logits, 5, CountedMask(np.array([False, True, True])), 1.0, 0.0)
    assert candidates is not None
    assert candidates.tolist() == [1, 2]
