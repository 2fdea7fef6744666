"""Guesses by looking back."""

import pytest

from edgeinfer.sampling import SamplingParams
from edgeinfer.speculation.drafter import DraftRequest
from edgeinfer.speculation.prompt_lookup import PromptLookup

PARAMS = SamplingParams()


def guess(lookup: PromptLookup, text: str, limit: int = 3) -> str:
    """Characters as tokens."""
    return "".join(map(chr, lookup.propose([*map(ord, text)], DraftRequest(limit, PARAMS)).ids))


@pytest.mark.parametrize(
    ("text", "follows"),
    [
        ("the cat sat. the c", "at "),
        ("abcX abcY abc", "Y a"),  # the latest place counts
        ("xabcdQ yzcdR abcd", "Q y"),  # the longest run counts
        ("aaaa", "a"),  # what follows may be cut off by the end
        ("abcdef", ""),
        ("a", ""),
        ("", ""),
    ],
)
def test_what_followed_the_longest_run_the_last_time(text: str, follows: str) -> None:
    assert guess(PromptLookup(), text) == follows


def test_the_index_grows_with_the_text_and_starts_afresh_with_another() -> None:
    lookup = PromptLookup()
    assert guess(lookup, "one two one") == " tw"
    assert guess(lookup, "one two one two one") == " tw"
    assert guess(lookup, "three on") == ""
    assert guess(lookup, "one two one") == " tw"


def test_references_are_looked_up_too() -> None:
    lookup = PromptLookup([[*map(ord, "def area(self): return")]])
    assert guess(lookup, "x area(", 4) == "self"
    assert guess(lookup, "y: retu", 9) == "rn"
    assert guess(lookup, "area(me) area(", 4) == "me) "


def test_no_more_is_guessed_than_is_asked_for() -> None:
    assert guess(PromptLookup(), "abcdefgh abc", 2) == "de"
    assert guess(PromptLookup(), "abcdefgh abc", 0) == ""


def test_the_place_in_the_references_that_agrees_longest_counts() -> None:
    first, second = "def area(self, unit): return width", "def size(self, unit): return height"
    lookup = PromptLookup([[*map(ord, text)] for text in (first, second)])
    assert guess(lookup, "x def area(self, unit): return ", 5) == "width"
    assert guess(lookup, "x def size(self, unit): return ", 5) == "heigh"


def test_runs_across_two_references_and_behind_their_end_are_none() -> None:
    lookup = PromptLookup([[*map(ord, text)] for text in ("abcd", "efgh", "x", "")])
    assert guess(lookup, "zcdef") == "gh"  # by "ef" alone
    assert guess(lookup, "zefgh") == ""
    assert guess(lookup, "zcd") == ""
    assert lookup.nbytes > 0


def test_guesses_from_runs_that_mislead_are_left_out_in_time() -> None:
    lookup, history = PromptLookup(), [1, 2, 3]
    for other in range(40):
        history += [1, 2]
        requested = lookup.propose(history, DraftRequest(1, PARAMS, 0.1)).ids
        history.append(100 + other)
    assert requested == ()
    assert lookup.propose(history[:-1], DraftRequest(1, PARAMS)).ids != ()
