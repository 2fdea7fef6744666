"""Guesses that are only compared with what comes."""

import numpy as np
import pytest

from edgeinfer.sampling.sampler import Distribution
from edgeinfer.speculation.drafts import Draft
from edgeinfer.speculation.shadow import Shadow


def test_guesses_are_judged_one_by_one_up_to_the_first_that_falls() -> None:
    history = [1, 2]
    shadow = Shadow(history, Draft((5, 6, 7)))
    found = []
    for came in (5, 8, 7, 9):
        found.append(shadow.judge(history, came, None))
        history.append(came)
    assert found == [1.0, 0.0, None, None]


def test_another_text_is_none_of_its_business() -> None:
    history = [1, 2]
    shadow = Shadow(history, Draft((5,)))
    assert shadow.judge([1, 2], 5, None) is None
    assert shadow.judge(history, 5, None) == 1.0


def test_guesses_that_were_drawn_are_judged_by_the_chance_with_which_they_would_stand() -> None:
    history = [1]
    drawn_from: Distribution = np.array([3, 4]), np.array([0.8, 0.2])
    wanted: Distribution = np.array([3, 5]), np.array([0.4, 0.6])
    shadow = Shadow(history, Draft((3,), (drawn_from,)))
    assert shadow.judge(history, 5, wanted) == pytest.approx(0.5)
