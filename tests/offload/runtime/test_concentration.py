"""The share of a text's activity that the hottest granules of another text cover."""

import numpy as np
import pytest

from edgeinfer_offload.runtime.concentration import SHARES, coverage


def counts(first: list[int], last: list[int]) -> "np.ndarray[tuple[int, ...], np.dtype[np.uint32]]":
    return np.array([first, last], np.uint32)


def test_equal_granules_cover_their_share() -> None:
    result = coverage([counts([5] * 20, [5] * 20)], (10, 10))
    assert result.covered == pytest.approx(SHARES)
    assert result.active == 0.5
    assert not result.beats_uniform


def test_the_first_half_selects_and_the_second_half_evaluates() -> None:
    hot = counts([9, 9, *[1] * 8], [8, 8, *[2] * 8])
    assert coverage([hot], (10, 10)).covered == pytest.approx((8 / 32, 16 / 32, 18 / 32, 22 / 32))
    assert coverage([hot], (10, 10)).beats_uniform
    turned = counts([9, 9, *[1] * 8], [0, 0, *[2] * 8])
    assert coverage([turned], (10, 10)).covered[:2] == (0, 0)
    assert not coverage([turned], (10, 10)).beats_uniform


def test_layers_select_their_hottest_granules_jointly() -> None:
    layers = [counts([9, *[0] * 9], [9, *[0] * 9]), counts([*[0] * 9, 9], [*[0] * 9, 1])]
    assert coverage(layers, (10, 10)).covered[0] == 1


def test_a_part_of_a_granule_counts_in_part_and_no_activity_covers_nothing() -> None:
    assert coverage([counts([3, 2, 1], [3, 2, 1])], (4, 4)).covered[3] == pytest.approx(4 / 6)
    silent = coverage([counts([0, 0], [0, 0])], (4, 4))
    assert (silent.active, silent.covered) == (0, (0, 0, 0, 0))
