"""How long a draft should be, by made-up costs."""

from itertools import pairwise

import pytest

from edgeinfer.speculation.pacing import FIRST_PAUSE, MOST_DRAFTED, Pace


def paced(row: float, draft: float, stands: list[bool]) -> Pace:
    """A pass of n tokens takes 1 + row·(n - 1) seconds; guesses stood as given."""
    pace = Pace()
    for _ in range(50):
        for rows in range(1, MOST_DRAFTED + 2):
            pace.passed(rows, 1 + row * (rows - 1))
        pace.drafted(4, 4 * draft)
    for stood in stands:
        pace.judged(1, int(stood))
    return pace


def test_nothing_is_drafted_before_a_plain_pass_was_seen() -> None:
    assert Pace().length(7) == 0


@pytest.mark.parametrize(
    ("row", "draft", "share", "least", "most"),
    [
        (0.05, 0.1, 9, 4, 7),  # nine of ten stand, drafts are cheap
        (0.05, 0.1, 5, 1, 2),
        (0.05, 0.4, 3, 0, 0),
        (0.9, 0.1, 9, 0, 0),  # a pass of two costs nearly as much as two
        (0.02, 0.0, 7, 5, 7),  # guesses that cost nothing
    ],
)
def test_the_length_follows_costs_and_acceptance(
    row: float, draft: float, share: int, least: int, most: int
) -> None:
    pace = paced(row, draft, [index % 10 < share for index in range(100)])
    # What was seen last weighs most: come to the share from above and from below.
    assert least <= pace.length(7) <= most + 1


def test_no_more_than_there_is_room_for() -> None:
    pace = paced(0.02, 0.0, [True] * 50)
    assert [pace.length(room) for room in (-1, 0, 1, 3, 100)] == [0, 0, 1, 3, MOST_DRAFTED]


def test_useless_drafts_are_tried_ever_more_rarely() -> None:
    pace = paced(0.3, 0.4, [False] * 60)
    attempts = []
    for token in range(2000):
        if pace.length(7):
            attempts.append(token)
            pace.judged(2, 0)
    gaps = [b - a for a, b in pairwise(attempts)]
    assert attempts[0] == FIRST_PAUSE
    assert gaps == sorted(gaps)
    assert len(attempts) < 9


def test_drafting_goes_on_when_guesses_stand_again() -> None:
    pace = paced(0.05, 0.1, [False] * 60)
    assert pace.length(7) == 0
    for _ in range(12):
        pace.judged(2, 2)
    assert pace.length(7) >= 3


def test_costs_between_and_beyond_the_measured_ones_lie_on_a_line() -> None:
    pace = Pace()
    pace.passed(1, 1.0)
    assert pace.pass_seconds(3) == pytest.approx(1.16)
    pace.passed(5, 2.0)
    assert pace.pass_seconds(3) == pytest.approx(1.5)
    assert pace.pass_seconds(7) == pytest.approx(2.16)


def test_a_disturbed_pass_weighs_less_than_a_quick_one() -> None:
    pace = Pace()
    pace.passed(1, 1.0)
    pace.passed(1, 3.0)
    assert pace.pass_seconds(1) == pytest.approx(1.2)
    pace.passed(1, 0.9)
    assert pace.pass_seconds(1) < 0.95


def test_a_token_must_be_likely_enough_to_be_worth_its_cost() -> None:
    cheap, dear = paced(0.02, 0.05, [True] * 20), paced(0.02, 0.5, [True] * 20)
    assert all(a < b for a, b in zip(cheap.least_chances(4), dear.least_chances(4), strict=True))
    assert all(0 <= chance <= 1 for chance in dear.least_chances(7))
    assert Pace().least_chances(3) == [0.0] * 3
