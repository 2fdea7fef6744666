"""Which tokens are evaluated and scored."""

import pytest

from edgeinfer.errors import SettingError
from edgeinfer.evaluation import logit_sources
from edgeinfer.evaluation.logit_sources import window_slices
from edgeinfer.evaluation.windows import Windows


def test_windows_are_contiguous_and_the_remainder_is_dropped() -> None:
    result = list(Windows(range(100, 130), 8))
    assert [window.ids for window in result] == [tuple(range(first, first + 8)) for first in (100, 108, 116)]


def test_the_second_half_is_scored() -> None:
    (window,) = Windows(range(8), 8)
    # llama.cpp scores context - 1 - context/2 tokens of a window.
    assert window.targets == (5, 6, 7)


def test_bos_replaces_the_first_token_of_each_window() -> None:
    result = list(Windows(range(16), 8, bos_id=99))
    assert [window.ids[:2] for window in result] == [(99, 1), (99, 9)]


def test_chunks_bound_the_number_of_windows() -> None:
    assert len(Windows(range(80), 8, max_windows=3)) == 3
    assert len(Windows(range(80), 8, max_windows=30)) == 10


@pytest.mark.parametrize(
    ("ids", "context", "limit", "message"),
    [
        (7, 8, None, "the text has 7 tokens, wanted at least 8 for one window"),
        (100, 7, None, "context: saw 7, wanted at least 8"),
        (100, 8, 0, "chunks: saw 0, wanted a whole number of at least 1"),
    ],
)
def test_a_text_without_a_window_is_refused(ids: int, context: int, limit: int | None, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        Windows(range(ids), context, max_windows=limit)


@pytest.mark.parametrize("elements", [10, 35, 1000])
def test_slices_cover_the_requested_logits_once(elements: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logit_sources, "SLICE_ELEMENTS", elements)
    (window,) = Windows(range(32), 32)
    slices = list(window_slices(window, vocabulary_size=10))
    covered = [index for begin, end in slices for index in range(begin, end)]
    assert covered == list(range(16, 31))
    assert max(end - begin for begin, end in slices) <= elements // 10
