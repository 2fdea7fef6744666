"""Asking about the likeliest tokens alone gives what the samplers leave of all that are allowed."""

import numpy as np
import numpy.typing as npt
import pytest

from edgeinfer.sampling import truncation
from edgeinfer.sampling.shortlist import FIRST_ASKED, MAX_ASKED, Shortlist

SIZE = 3000


def one_after_the_other(
    logits: npt.NDArray[np.float32], top_k: int, top_p: float, min_p: float
) -> npt.NDArray[np.int64]:
    """The three samplers as they are told apart."""
    ids = truncation.top_k(logits, top_k)
    ids = ids[truncation.top_p(logits[ids], top_p)] if top_p < 1 else ids
    return ids[truncation.min_p(logits[ids], min_p)]


class Asked:
    """Says whether a token is allowed, and counts."""

    def __init__(self, mask: npt.NDArray[np.bool_]) -> None:
        self.mask, self.times = mask, 0

    def __call__(self, token_id: int) -> bool:
        self.times += 1
        return bool(self.mask[token_id])


@pytest.mark.parametrize("top_k", [1, 5, 40, 100])
@pytest.mark.parametrize(("top_p", "min_p"), [(0.95, 0.05), (0.3, 0.0), (1.0, 0.2), (1.0, 0.0), (0.0, 1.0)])
@pytest.mark.parametrize("spread", [0.5, 3.0, 12.0])
def test_what_stays_is_what_the_samplers_leave_one_after_the_other(
    top_k: int, top_p: float, min_p: float, spread: float
) -> None:
    random = np.random.default_rng(7)
    found = few = 0
    for share in (1.0, 0.9, 0.5, 0.2) * 5:
        logits = (spread * random.standard_normal(SIZE)).astype(np.float32)
        mask = random.random(SIZE) < share
        want = one_after_the_other(np.where(mask, logits, np.float32(-np.inf)), top_k, top_p, min_p)
        asked = Asked(mask)
        kept = Shortlist(logits, top_k, asked).kept(top_p, min_p)
        assert asked.times <= MAX_ASKED
        if kept is not None:
            np.testing.assert_array_equal(kept, want)
            found += 1
            few += asked.times < top_k
        whole = Shortlist(logits, top_k).kept(top_p, min_p)
        assert whole is not None
        np.testing.assert_array_equal(whole, one_after_the_other(logits, top_k, top_p, min_p))
    if top_k <= 40 and (top_p < 1 or min_p > 0):
        assert found >= 5
    if top_k == 40 and spread > 1 and (top_p < 1 or min_p > 0):
        assert few >= 5


def test_equal_logits_stay_in_the_order_of_their_ids() -> None:
    random = np.random.default_rng(3)
    found = 0
    for _ in range(200):
        logits = random.integers(0, 4, 64).astype(np.float32)
        mask = random.random(64) < 0.8
        kept = Shortlist(logits, 20, Asked(mask)).kept(0.7, 0.1)
        if kept is not None:
            masked = np.where(mask, logits, np.float32(-np.inf))
            np.testing.assert_array_equal(kept, one_after_the_other(masked, 20, 0.7, 0.1))
            found += 1
    assert found > 20


def test_where_rounding_decides_nothing_is_said() -> None:
    logits = np.zeros(20, np.float32)
    assert Shortlist(logits, 20).kept(0.5, 0.0) is None
    assert Shortlist(logits, 20, Asked(np.ones(20, bool))).kept(0.5, 0.0) is None
    kept = Shortlist(logits, 20).kept(0.52, 0.0)
    assert kept is not None
    assert kept.tolist() == list(range(11))


def test_it_gives_up_soon_where_none_of_the_likeliest_is_allowed() -> None:
    logits = np.arange(100, dtype=np.float32)
    asked = Asked(logits < 100 - FIRST_ASKED - 1)
    assert Shortlist(logits, 40, asked).kept(0.95, 0.05) is None
    assert asked.times == FIRST_ASKED


def test_one_sure_token_is_asked_about_alone() -> None:
    logits = np.array([0.0, 20.0, 1.0, 2.0], np.float32)
    asked = Asked(np.array([False, True, False, False]))
    kept = Shortlist(logits, 3, asked).kept(0.95, 0.05)
    assert kept is not None
    assert kept.tolist() == [1]
    assert asked.times == 1


def test_those_behind_the_best_few_come_up_where_one_is_refused() -> None:
    """Top-k counts the allowed: what stands behind the list isn't known, so that nothing is said."""
    logits = np.array([4.0, 3.9, 3.8, 3.7], np.float32)
    mask = np.array([True, False, True, True])
    assert Shortlist(logits, 3, Asked(mask)).kept(1.0, 0.05) is None
    kept = Shortlist(logits, 3, Asked(mask)).kept(0.3, 0.05)
    assert kept is not None
    assert kept.tolist() == one_after_the_other(np.where(mask, logits, -np.inf), 3, 0.3, 0.05).tolist()
