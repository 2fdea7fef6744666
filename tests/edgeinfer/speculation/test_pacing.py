"""How long a draft should be, by made-up costs."""

import pytest

from edgeinfer.speculation.pacing import EVIDENCE, FIRST_REST, LONGEST_REST, MOST_DRAFTED, Pace


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


def test_looking_whether_drafts_would_stand_takes_a_hundredth_of_the_time() -> None:
    pace = paced(0.3, 0.4, [False] * 60)
    assert pace.length(7) == 0
    looked = 0
    for _ in range(3000):
        pace.passed(1, 1.0)
        if pace.probes():
            looked += 1
            pace.probed(0, 0.5)  # half as long as a pass
    assert 0.8 * 60 <= looked <= 60 + 3


def test_dear_looks_are_paid_for_before_and_after() -> None:
    pace = paced(0.3, 0.4, [False] * 60)
    spent, tokens = 0.0, 4000
    for _ in range(tokens):
        if pace.probes():
            cost = 3.0 if spent == 0 else 8.0
            spent += cost
            pace.probed(0, cost)
    assert spent <= 0.01 * tokens + 8.0


def test_a_quick_look_tells_that_guesses_are_cheap() -> None:
    pace = paced(0.05, 2.0, [True] * 30)
    assert pace.length(7) == 0
    pace.probed(3, 0.3)
    for _ in range(20):
        pace.stood(1.0)
    assert pace.length(7) > 0


def test_drafting_goes_on_when_guesses_would_stand_again() -> None:
    pace = paced(0.05, 0.1, [False] * 60)
    assert pace.length(7) == 0
    for _ in range(25):
        pace.stood(1.0)
    assert pace.length(7) >= 3


def test_useless_drafts_are_given_up_after_a_few_guesses() -> None:
    pace = paced(0.05, 0.3, [])
    wasted = 0
    while length := pace.length(7):
        wasted += length
        pace.judged(length, 0)
    assert 1 <= wasted <= 8


def test_costs_between_and_beyond_the_measured_ones_lie_on_a_line() -> None:
    pace = Pace()
    pace.passed(1, 1.0)
    assert pace.pass_seconds(3) == pytest.approx(1.16)
    pace.measured({1: 1.0, 5: 2.0})
    assert pace.pass_seconds(3) == pytest.approx(1.5)
    assert pace.pass_seconds(7) == pytest.approx(2.16)


def test_a_disturbed_pass_weighs_less_than_a_quick_one() -> None:
    pace = Pace()
    pace.passed(1, 1.0)
    pace.passed(1, 3.0)
    assert pace.pass_seconds(1) == pytest.approx(1.2)
    pace.passed(1, 0.8)
    assert pace.pass_seconds(1) == pytest.approx(1.0)


def test_a_machine_that_slows_down_slows_all_passes_alike() -> None:
    pace = paced(0.1, 0.1, [True] * 20)
    length = pace.length(7)
    for _ in range(60):
        pace.passed(1, 2.0)
    assert pace.pass_seconds(5) == pytest.approx(2 * 1.4, rel=0.02)
    pace.drafted(4, 0.8)
    assert abs(pace.length(7) - length) <= 1


def test_what_rows_cost_beside_one_is_learnt_from_passes_of_so_many() -> None:
    pace = Pace()
    pace.measured({1: 1.0, 4: 1.3, 8: 1.6})
    for _ in range(80):
        pace.passed(4, 2.0)
        pace.passed(1, 1.0)
    assert pace.pass_seconds(4) == pytest.approx(2.0, rel=0.05)
    assert pace.pass_seconds(1) == pytest.approx(1.0, rel=0.05)


def test_now_and_then_a_pass_is_made_without_a_draft() -> None:
    pace, lengths = paced(0.05, 0.1, [True] * 20), []
    for _ in range(300):
        lengths.append(pace.length(7))
        pace.passed(1 + lengths[-1], 1 + 0.05 * lengths[-1])
    assert lengths.count(0) == 4


def test_rows_that_were_dear_for_a_while_are_tried_again() -> None:
    pace = Pace()
    pace.measured({1: 1.0, 2: 1.1, 4: 1.2, 8: 1.4})
    for _ in range(40):
        for rows in range(2, 9):
            pace.passed(rows, 9.0)
    pace.passed(1, 1.0)
    lengths = []
    for _ in range(1000):
        lengths.append(pace.length(7))
        pace.passed(1, 1.0)
    assert lengths[0] == 0
    assert lengths[-1] > 0


def test_a_token_must_be_likely_enough_to_be_worth_its_cost() -> None:
    cheap, dear = paced(0.02, 0.05, [True] * 20), paced(0.02, 0.5, [True] * 20)
    assert all(a < b for a, b in zip(cheap.least_chances(4), dear.least_chances(4), strict=True))
    assert all(0 <= chance <= 1 for chance in dear.least_chances(7))
    assert Pace().least_chances(3) == [0.0] * 3


def certain(rows: dict[int, float]) -> Pace:
    """A pace whose guesses have all stood, with passes that cost so much."""
    pace = Pace()
    pace.measured(rows)
    for _ in range(50):
        pace.judged(4, 4)
    pace.drafted(4, 0.4)
    return pace


def steps(pace: Pace, count: int, tokens: int, seconds: float) -> None:
    for _ in range(count):
        pace.earned(tokens, seconds)


def rested(pace: Pace) -> int:
    """Tokens until something is drafted again."""
    return next(count for count in range(5000) if pace.length(4))


def test_drafts_that_promise_much_and_earn_less_than_plain_decoding_rest_ever_longer() -> None:
    pace = certain({1: 1.0, 2: 1.1, 4: 1.2, 8: 1.4})
    assert pace.length(4) > 0
    found = []
    for _ in range(3):
        steps(pace, EVIDENCE, 1, 1.5)
        found.append(rested(pace))
    assert found == [FIRST_REST, 2 * FIRST_REST, 4 * FIRST_REST]
    for _ in range(12):
        steps(pace, EVIDENCE, 1, 1.5)
        found.append(rested(pace))
    assert found[-1] == LONGEST_REST


def test_after_drafts_have_earned_more_the_next_rest_is_short_again() -> None:
    pace = certain({1: 1.0, 2: 1.1, 4: 1.2, 8: 1.4})
    for _ in range(3):
        steps(pace, EVIDENCE, 1, 1.5)
        rested(pace)
    steps(pace, 2 * EVIDENCE, 3, 1.5)
    assert pace.length(4) > 0
    for _ in range(50):
        pace.earned(1, 4.0)
        if not pace.length(4):
            break
    assert rested(pace) == FIRST_REST - 1


def test_little_evidence_stops_nothing() -> None:
    pace = certain({1: 1.0, 2: 1.1, 4: 1.2, 8: 1.4})
    steps(pace, EVIDENCE - 1, 1, 9.0)
    assert pace.length(4) > 0


def test_a_guess_is_worth_what_the_way_things_go_earns() -> None:
    pace = certain({1: 1.0, 2: 1.1, 4: 1.3, 8: 1.7})
    before = pace.least_chances(3)
    steps(pace, 2 * EVIDENCE, 2, 1.0)
    after = pace.least_chances(3)
    assert before == pytest.approx([0.2, 0.2, 0.2])
    assert after == pytest.approx([0.4, 0.4, 0.4])
