"""DRY: what it penalizes, by how much, where it stops, and that it stays linear."""

import random
import sys
import time
from typing import Any

import pytest

from edgeinfer.sampling import SamplingParams
from edgeinfer.sampling.dry import SequenceBreakers, dry_penalties, repeated_lengths

WORDS = {
    index: text.encode() for index, text in enumerate(["a", "b", "c", "d", "\n", "x:y", "EN", "D", "e D"])
}
NONE = SequenceBreakers((), None)


def penalties(history: list[int], breakers: tuple[str, ...] = (), **fields: Any) -> dict[int, float]:
    settings = SamplingParams(dry_multiplier=1.0, dry_base=2.0, dry_sequence_breakers=breakers, **fields)
    return dry_penalties(history, settings, SequenceBreakers(breakers, WORDS.__getitem__))


def slow_lengths(history: list[int], limit: int) -> dict[int, int]:
    """The definition: for each earlier place, compare backwards from there and from the end."""
    longest: dict[int, int] = {}
    for end in range(1, len(history)):
        length = 0
        while length < end and history[end - 1 - length] == history[-1 - length]:
            length += 1
        if length:
            longest[history[end]] = max(longest.get(history[end], 0), min(length, limit))
    return longest


def test_the_token_that_would_extend_a_repetition_is_penalized() -> None:
    assert penalties([0, 1, 2, 0, 1]) == {2: 1.0}


def test_the_penalty_grows_with_the_length_beyond_the_allowed_one() -> None:
    assert penalties([0, 1, 2, 3, 0, 1, 2]) == {3: 2.0}
    assert penalties([0, 1, 2, 3, 0, 1, 2], dry_allowed_length=1) == {3: 4.0}
    assert penalties([0, 1, 2, 3, 0, 1, 2], dry_allowed_length=4) == {}


def test_the_longest_repetition_counts_for_each_follower() -> None:
    # After "1 2" came 3 (three tokens repeat: 0 1 2) and 5 (two repeat).
    assert penalties([0, 1, 2, 3, 4, 1, 2, 5, 0, 1, 2]) == {3: 2.0, 5: 1.0}


def test_no_repetition_and_no_history_give_no_penalty() -> None:
    assert penalties([]) == {}
    assert penalties([0]) == {}
    assert penalties([0, 1, 2, 3]) == {}


def test_only_the_last_tokens_are_searched() -> None:
    assert penalties([0, 1, 2, 0, 1], dry_penalty_last_n=4) == {}
    assert penalties([0, 1, 2, 0, 1], dry_penalty_last_n=5) == {2: 1.0}
    assert penalties([0, 1, 2, 0, 1], dry_penalty_last_n=0) == {}


def test_a_breaker_ends_the_repetition() -> None:
    assert penalties([0, 4, 1, 2, 0, 4, 1], ("\n",)) == {}
    assert penalties([4, 0, 1, 2, 4, 0, 1], ("\n",)) == {2: 1.0}


def test_a_breaker_inside_a_token_counts() -> None:
    assert penalties([0, 5, 1, 2, 0, 5, 1], (":",)) == {}
    assert penalties([0, 5, 1, 2, 0, 5, 1]) == {2: 2.0}


def test_a_breaker_across_two_tokens_counts_from_its_end() -> None:
    breakers = SequenceBreakers(("END",), WORDS.__getitem__)
    assert breakers.tokens_after([0, 6, 7, 1, 2], 99) == 2
    assert breakers.tokens_after([0, 6, 1, 7, 2], 99) == 5
    assert SequenceBreakers(("e DEND",), WORDS.__getitem__).tokens_after([8, 6, 7], 99) == 0


def test_a_token_that_contains_a_breaker_is_not_penalized() -> None:
    assert penalties([0, 1, 4, 0, 1], ()) == {4: 1.0}
    assert penalties([0, 1, 4, 0, 1], ("\n",)) == {}


def test_without_token_bytes_no_breaker_applies() -> None:
    assert SequenceBreakers(("\n",), None).tokens_after([4, 4, 4], 99) == 3


@pytest.mark.parametrize("alphabet", [1, 2, 3, 10])
@pytest.mark.parametrize("limit", [2, 7, 1000])
def test_lengths_equal_their_definition(alphabet: int, limit: int) -> None:
    rng = random.Random(alphabet * limit)
    for size in [0, 1, 2, 5, 31, 120]:
        history = [rng.randrange(alphabet) for _ in range(size)]
        assert repeated_lengths(history, limit) == slow_lengths(history, limit)


def test_extreme_lengths_stay_finite() -> None:
    settings = SamplingParams(dry_multiplier=1e300, dry_base=1e6)
    assert dry_penalties([3] * 5000, settings, NONE) == {3: 1e30}
    assert dry_penalties([3] * 5000, SamplingParams(dry_multiplier=2.0, dry_base=1.0), NONE) == {3: 2.0}


@pytest.mark.default_cases(1)
@pytest.mark.skipif(sys.platform == "win32", reason="its clock of processor time is coarse")
@pytest.mark.parametrize("period", [1, 2, 97])
def test_a_history_twice_as_long_costs_about_twice_as_much(period: int) -> None:
    settings = SamplingParams(dry_multiplier=1.0, dry_base=1.001)

    def seconds(size: int) -> float:
        history = [index % period for index in range(size)]
        best = 1e9
        for _ in range(3):
            start = time.process_time()
            dry_penalties(history, settings, NONE)
            best = min(best, time.process_time() - start)
        return best

    assert seconds(80_000) < 12 * seconds(20_000) + 0.01
