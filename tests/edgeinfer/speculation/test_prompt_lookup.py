"""Drafts by prompt lookup."""

import pytest

from edgeinfer.sampling import SamplingParams
from edgeinfer.speculation.drafter import DraftRequest
from edgeinfer.speculation.prompt_lookup import PromptLookup

PARAMS = SamplingParams()


def draft(lookup: PromptLookup, text: str, limit: int = 3) -> str:
    """Characters as tokens."""
    return "".join(map(chr, lookup.propose([*map(ord, text)], DraftRequest(limit, PARAMS)).ids))


@pytest.mark.parametrize(
    ("text", "follows"),
    [
        ("the cat sat. the c", "at "),
        ("abcX abcY abc", "Y a"),  # the last occurrence counts
        ("xabcdQ yzcdR abcd", "Q y"),  # the longest match counts
        ("aaaa", "a"),  # the end may truncate the continuation
        ("abcdef", ""),
        ("a", ""),
        ("", ""),
    ],
)
def test_lookup_returns_the_last_continuation_of_the_longest_match(text: str, follows: str) -> None:
    assert draft(PromptLookup(), text) == follows


def test_the_index_grows_with_the_text_and_is_rebuilt_for_another() -> None:
    lookup = PromptLookup()
    assert draft(lookup, "one two one") == " tw"
    assert draft(lookup, "one two one two one") == " tw"
    assert draft(lookup, "three on") == ""
    assert draft(lookup, "one two one") == " tw"


def test_lookup_files_are_searched_too() -> None:
    lookup = PromptLookup([[*map(ord, "def area(self): return")]])
    assert draft(lookup, "x area(", 4) == "self"
    assert draft(lookup, "y: retu", 9) == "rn"
    assert draft(lookup, "area(me) area(", 4) == "me) "


def test_a_draft_is_no_longer_than_requested() -> None:
    assert draft(PromptLookup(), "abcdefgh abc", 2) == "de"
    assert draft(PromptLookup(), "abcdefgh abc", 0) == ""


def test_the_longest_match_in_lookup_files_is_used() -> None:
    first, second = "def area(self, unit): return width", "def size(self, unit): return height"
    lookup = PromptLookup([[*map(ord, text)] for text in (first, second)])
    assert draft(lookup, "x def area(self, unit): return ", 5) == "width"
    assert draft(lookup, "x def size(self, unit): return ", 5) == "heigh"


def test_matches_do_not_cross_the_end_of_a_lookup_file() -> None:
    lookup = PromptLookup([[*map(ord, text)] for text in ("abcd", "efgh", "x", "")])
    assert draft(lookup, "zcdef") == "gh"  # by "ef" only
    assert draft(lookup, "zefgh") == ""
    assert draft(lookup, "zcd") == ""
    assert lookup.nbytes > 0


def test_misleading_matches_are_dropped() -> None:
    lookup, history = PromptLookup(), [1, 2, 3]
    for other in range(40):
        history += [1, 2]
        requested = lookup.propose(history, DraftRequest(1, PARAMS, 0.1)).ids
        history.append(100 + other)
    assert requested == ()
    assert lookup.propose(history[:-1], DraftRequest(1, PARAMS)).ids != ()
