"""A completion ends before a stop string, and no part of one is ever emitted."""

import random

import pytest

from edgeinfer.tokenizer.detokenizer import StopStrings


def shown(stops: list[str], pieces: list[str]) -> tuple[list[str], str | None]:
    """The text that each piece emits, then that of the end; and the stop that was found."""
    filter_ = StopStrings(stops)
    out = []
    for piece in pieces:
        out.append(filter_.push(piece))
        if filter_.found is not None:
            return out, filter_.found
    return [*out, filter_.finish()], None


def test_text_that_cannot_begin_a_stop_is_emitted_at_once() -> None:
    assert shown(["END"], ["a", "b N", "D"]) == (["a", "b N", "D", ""], None)


def test_a_stop_over_several_pieces_is_found_and_not_emitted() -> None:
    assert shown(["END"], ["one E", "N", "D two"]) == (["one ", "", ""], "END")


def test_an_incomplete_stop_is_emitted_late() -> None:
    assert shown(["END"], ["E", "N", "T"]) == (["", "", "ENT", ""], None)
    assert shown(["END"], ["x", "EN"]) == (["x", "", "EN"], None)


def test_a_stop_at_the_start_emits_nothing() -> None:
    assert shown(["\n\n"], ["\n\nHello"]) == ([""], "\n\n")


def test_overlapping_stop_prefixes_are_not_lost() -> None:
    assert shown(["aab"], ["a", "a", "a", "b"]) == (["", "", "a", ""], "aab")
    assert shown(["abab!"], ["ab", "ab", "ab!"]) == (["", "", "ab"], "abab!")


def test_the_earliest_of_several_stops_wins() -> None:
    assert shown(["two", "one"], ["x one two"]) == (["x "], "one")
    assert shown(["ab", "abc"], ["xabc"]) == (["x"], "ab")


def test_empty_stop_strings_have_no_effect() -> None:
    assert shown(["", ""], ["abc"]) == (["abc", ""], None)
    assert not StopStrings([""]).holds


@pytest.mark.parametrize("seed", range(20))
def test_every_split_into_pieces_emits_the_same_text(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(100):
        text = "".join(rng.choice("ab") for _ in range(12))
        stops = ["".join(rng.choice("ab") for _ in range(rng.randrange(1, 5))) for _ in range(2)]
        indices = [text.index(stop) for stop in stops if stop in text]
        pieces, rest = [], text
        while rest:
            size = rng.randrange(1, 4)
            pieces.append(rest[:size])
            rest = rest[size:]
        out, result = shown(stops, pieces)
        if result is None:
            assert not indices
            assert "".join(out) == text
        else:
            # A longer stop may complete later than one that starts after it.
            assert "".join(out) == text[: text.index(result)]
            assert not any(stop in "".join(out) for stop in stops)
