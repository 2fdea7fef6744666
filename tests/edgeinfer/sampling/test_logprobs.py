"""Log-probabilities are those of the raw logits."""

import math

import numpy as np

from edgeinfer.sampling import logprobs


def test_log_probabilities_of_a_vector_worked_out_by_hand() -> None:
    logits = np.log(np.array([0.1, 0.6, 0.3])).astype(np.float32) + np.float32(7)
    selected, top = logprobs(logits, 0, 2)
    assert math.isclose(selected, math.log(0.1), abs_tol=1e-5)
    assert [token_id for token_id, _ in top] == [1, 2]
    assert math.isclose(top[0][1], math.log(0.6), abs_tol=1e-5)


def test_no_top_is_an_empty_tuple() -> None:
    assert logprobs(np.zeros(4, dtype=np.float32), 2)[1] == ()


def test_more_than_the_vocabulary_gives_the_vocabulary() -> None:
    assert [token_id for token_id, _ in logprobs(np.zeros(3, dtype=np.float32), 2, 9)[1]] == [0, 1, 2]


def test_a_banned_token_has_minus_infinity() -> None:
    assert logprobs(np.array([0.0, -np.inf], dtype=np.float32), 1)[0] == -math.inf


def test_huge_logits_do_not_overflow() -> None:
    selected, _ = logprobs(np.array([1e30, 1e30], dtype=np.float32), 0)
    assert math.isclose(selected, -math.log(2), rel_tol=1e-6)
