"""Repetition, presence and frequency penalties, worked out by hand."""

from typing import Any

import numpy as np
import pytest

from edgeinfer.sampling import SamplingParams
from edgeinfer.sampling.penalties import last_tokens, penalize_repetition


def penalized(logits: list[float], history: list[int], **fields: Any) -> list[float]:
    values = np.array(logits, dtype=np.float32)
    penalize_repetition(values, history, SamplingParams(**fields))
    return [round(float(value), 5) for value in values]


def test_repetition_divides_above_zero_and_multiplies_below() -> None:
    assert penalized([2.0, -2.0, 0.0, 1.0], [0, 1, 2], repeat_penalty=2.0) == [1.0, -4.0, 0.0, 1.0]


def test_repetition_counts_a_token_once() -> None:
    assert penalized([2.0, 2.0], [0, 0, 0], repeat_penalty=2.0) == [1.0, 2.0]


def test_presence_counts_once_and_frequency_each_time() -> None:
    assert penalized([1.0, 1.0, 1.0], [0, 0, 0, 1], presence_penalty=0.5) == [0.5, 0.5, 1.0]
    assert penalized([1.0, 1.0, 1.0], [0, 0, 0, 1], frequency_penalty=0.5) == [-0.5, 0.5, 1.0]


def test_the_three_combine_with_the_division_first() -> None:
    settings = {"repeat_penalty": 2.0, "presence_penalty": 0.25, "frequency_penalty": 0.5}
    assert penalized([4.0, 4.0], [1, 1], **settings) == [4.0, 0.75]


def test_a_negative_penalty_raises_repeated_tokens() -> None:
    assert penalized([0.0, 0.0], [1], presence_penalty=-1.0) == [0.0, 1.0]


def test_only_the_last_tokens_count() -> None:
    assert penalized([2.0, 2.0, 2.0], [0, 1, 2], repeat_penalty=2.0, repeat_last_n=2) == [2.0, 1.0, 1.0]
    assert penalized([2.0, 2.0, 2.0], [0, 1, 2], repeat_penalty=2.0, repeat_last_n=-1) == [1.0, 1.0, 1.0]


def test_absent_tokens_and_an_empty_history_change_nothing() -> None:
    assert penalized([1.0, -1.0], [], repeat_penalty=3.0) == [1.0, -1.0]


def test_a_banned_token_stays_banned() -> None:
    settings = {"repeat_penalty": 1.5, "presence_penalty": -9.0}
    assert penalized([float("-inf"), 1.0], [0], **settings)[0] == float("-inf")


@pytest.mark.parametrize(
    ("count", "left"), [(0, []), (2, [2, 3]), (3, [1, 2, 3]), (9, [1, 2, 3]), (-1, [1, 2, 3])]
)
def test_last_tokens_counts_from_the_end(count: int, left: list[int]) -> None:
    assert list(last_tokens([1, 2, 3], count)) == left
