"""How long a draft should be, by made-up costs."""

import pytest

from edgeinfer.speculation.pacing import (
    ALLOWANCE,
    EVIDENCE,
    FIRST_LENGTH,
    FIRST_PURSE,
    FULL_PURSE,
    MOST_DRAFTED,
    PLAIN_EVERY,
    PLAIN_RUN,
    TRIALS,
    Pace,
)


def paced(row: float, draft: float, stands: list[bool], earns: bool = True) -> Pace:
    """A pass of n tokens takes 1 + row·(n - 1) seconds; guesses stood as given."""
    pace = Pace()
    for _ in range(50):
        for rows in (*range(2, MOST_DRAFTED + 2), *[1] * PLAIN_RUN):
            pace.passed(rows, 1 + row * (rows - 1))
        pace.drafted(4, 4 * draft)
    for stood in stands:
        pace.judged(1, int(stood))
    if earns:
        for _ in range(EVIDENCE):
            pace.stepped(8, 2, 0, 0.0, 1.0)
    assert pace.earns == earns
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


def test_looking_whether_drafts_would_stand_takes_a_small_share_of_the_time() -> None:
    pace = paced(0.3, 0.4, [False] * 60, earns=False)
    assert pace.length(7) == 0
    looked = 0
    for _ in range(3000):
        pace.passed(1, 1.0)
        if pace.probes():
            looked += 1
            pace.probed(0, 0.5)  # half as long as a pass
    spent, allowed = 0.5 * looked, ALLOWANCE * 3000
    assert 0.9 * allowed <= spent <= allowed + FULL_PURSE + 0.5


def test_dear_looks_are_paid_for_before_and_after() -> None:
    pace = paced(0.3, 0.4, [False] * 60, earns=False)
    spent, tokens = 0.0, 4000
    for _ in range(tokens):
        pace.passed(1, 1.0)
        if pace.probes():
            cost = 3.0 if spent == 0 else 8.0
            spent += cost
            pace.probed(0, cost)
    assert spent <= ALLOWANCE * tokens + FULL_PURSE + 8.0


def test_nobody_looks_while_drafts_earn() -> None:
    assert not paced(0.05, 0.1, [True] * 20).probes()


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
        for _ in range(PLAIN_RUN):
            pace.passed(1, 1.0)
    assert pace.pass_seconds(4) == pytest.approx(2.0, rel=0.05)
    assert pace.pass_seconds(1) == pytest.approx(1.0, rel=0.05)


def test_now_and_then_a_pass_is_made_without_a_draft() -> None:
    pace, lengths = paced(0.05, 0.1, [True] * 20), []
    for _ in range(300):
        lengths.append(pace.length(7))
        pace.passed(1 + lengths[-1], 1 + 0.05 * lengths[-1])
    assert [length > 0 for length in lengths[: PLAIN_EVERY + PLAIN_RUN + 1]] == [
        *[True] * PLAIN_EVERY,
        *[False] * PLAIN_RUN,
        True,
    ]


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
    assert all(a < b for a, b in zip(cheap.further_chances(4), dear.further_chances(4), strict=True))
    assert cheap.least_chances(4) == dear.least_chances(4)  # what has been guessed costs its row only
    for chances in (dear.least_chances(7), dear.further_chances(7)):
        assert len(chances) == 7
        assert all(0 <= chance <= 1 for chance in chances)
    assert Pace().least_chances(3) == Pace().further_chances(3) == [0.0] * 3


def begun(rows: dict[int, float]) -> Pace:
    """A pace that has been told what passes cost, and has seen plain ones."""
    pace = Pace()
    pace.measured(rows)
    for _ in range(PLAIN_RUN):
        assert pace.length(7) == 0
        pace.passed(1, rows[1])
    return pace


def certain(rows: dict[int, float]) -> Pace:
    """A pace whose guesses have all stood, with passes that cost so much."""
    pace = begun(rows)
    for _ in range(50):
        pace.judged(4, 4)
    pace.drafted(4, 0.4)
    return pace


def steps(pace: Pace, count: int, tokens: int, seconds: float) -> None:
    """Steps whose drafts of four took a tenth of the time that their passes of four rows did."""
    for _ in range(count):
        pace.stepped(tokens, 4, 4, seconds / 11, 10 * seconds / 11)


def test_the_first_draft_of_all_is_short_and_the_next_as_long_as_it_promises() -> None:
    pace = certain({1: 1.0, 2: 1.1, 4: 1.2, 8: 1.4})
    assert pace.length(7) == FIRST_LENGTH
    steps(pace, 1, 3, 1.3)
    assert pace.length(7) > FIRST_LENGTH


def wasted(pace: Pace, tokens: int, missed: float) -> float:
    """What drafts none of which stands cost in so many passes, beyond plain decoding; `missed` seconds go to
    reading what the drafter had missed when nothing has been drafted for 64 tokens.
    """
    lost, since = 0.0, 64
    for _ in range(tokens):
        since += 1
        length = pace.length(7)
        if not length:
            pace.passed(1, 1.0)
            continue
        looked = 0.06 * length + (missed if since > 64 else 0.0)
        since = 0
        pace.drafted(length, looked)
        pace.passed(1 + length, 1 + 0.02 * length)
        pace.stepped(1, 1 + length, length, looked, 1 + 0.02 * length)
        pace.judged(length, 0)
        lost += looked + 0.02 * length
    return lost


@pytest.mark.parametrize("missed", [0.0, 1.0, 5.0])
def test_a_useless_draft_costs_little_however_much_it_has_to_read(missed: float) -> None:
    pace = begun({1: 1.0, 2: 1.02, 4: 1.06, 8: 1.14})
    pace.draft_measured(0.0, 0.06)
    # The very first trials read what was missed as an investment.
    assert wasted(pace, 48, missed) <= 0.03 * 48 + missed
    for _ in range(10):
        pace.stood(0.9)  # as if the drafter had looked better for a while
        assert wasted(pace, 200, missed) <= 0.03 * 200 + missed


def test_trials_come_in_a_row() -> None:
    pace = certain({1: 1.0, 2: 1.1, 4: 1.2, 8: 1.4})
    tried = 0
    while pace.length(7):
        steps(pace, 1, 1, 1.6)
        tried += 1
    assert tried == TRIALS
    waited = 0
    while not pace.length(7):
        pace.passed(1, 1.0)
        waited += 1
    assert waited == pytest.approx((4 * 0.6 - FIRST_PURSE) / ALLOWANCE, rel=0.2)


def test_drafts_that_have_earned_go_on_until_they_earn_less_than_plain_decoding() -> None:
    pace = certain({1: 1.0, 2: 1.1, 4: 1.2, 8: 1.4})
    steps(pace, 30, 3, 1.6)
    assert pace.earns
    bad = 0
    while pace.earns:
        steps(pace, 1, 1, 1.6)
        bad += 1
    assert 3 <= bad <= 20
    steps(pace, 30, 3, 1.6)
    assert pace.earns


def test_a_disturbed_step_is_no_proof_against_drafts() -> None:
    pace = certain({1: 1.0, 2: 1.1, 4: 1.2, 8: 1.4})
    steps(pace, 10, 3, 1.6)
    steps(pace, 1, 3, 90.0)
    assert pace.earns


def test_a_guess_is_worth_what_the_way_things_go_earns() -> None:
    pace = certain({1: 1.0, 2: 1.1, 4: 1.3, 8: 1.7})
    least, further = pace.least_chances(3), pace.further_chances(3)
    assert least == pytest.approx([0.1, 0.1, 0.1])
    # A guess costs 0.1 too, and nearly all stand.
    assert further == pytest.approx([0.2, 0.2, 0.2], rel=0.05)
    for _ in range(40):
        pace.stepped(2, 2, 0, 0.0, 1.0)
    assert pace.least_chances(3) == pytest.approx([0.2, 0.2, 0.2])


def test_what_a_draft_takes_whatever_its_length_makes_short_ones_pay_less() -> None:
    long, short = (certain({1: 1.0, 2: 1.1, 4: 1.3, 8: 1.7}) for _ in range(2))
    for pace in (long, short):
        steps(pace, EVIDENCE, 8, 1.0)
    long.draft_measured(0.5, 0.1)
    short.draft_measured(0.0, 0.1)
    for _ in range(12):
        for pace in (long, short):
            pace.stood(0.0)
    assert long.length(7) == 0
    assert short.length(7) > 0


def test_a_pass_of_several_that_is_quicker_than_one_was_asks_what_one_takes_now() -> None:
    pace = paced(0.2, 0.1, [True] * 20)
    for _ in range(4):
        pace.passed(4, 0.16)  # the machine has become ten times as fast
    for _ in range(PLAIN_RUN):
        assert pace.length(7) == 0
        pace.passed(1, 0.1)
    assert pace.length(7) > 0
    assert pace.pass_seconds(1) < 0.2
    assert pace.pass_seconds(4) >= pace.pass_seconds(1)


def test_a_pass_right_behind_a_draft_says_nothing_of_plain_decoding() -> None:
    pace = paced(0.2, 0.1, [True] * 20)
    for _ in range(50):
        pace.passed(4, 1.6)
        pace.passed(1, 3.0)
    assert pace.pass_seconds(1) == pytest.approx(1.0)


def test_what_a_drafter_says_of_its_guesses_is_compared_with_what_comes() -> None:
    modest, boastful = (certain({1: 1.0, 2: 1.1, 4: 1.2, 8: 1.4}) for _ in range(2))
    before = modest.least_chances(2)
    for index in range(200):
        modest.heard([0.3, 0.3], 2 if index % 5 else 0)  # of ten guesses nine stand
        boastful.heard([0.9, 0.9], index % 2)
    assert modest.least_chances(2) < before < boastful.least_chances(2)
    # 0.3 stands for nine of ten by now: what must stand one time in ten may be called next to impossible.
    assert modest.least_chances(1)[0] < 1e-4
    guesses_of_lookup = certain({1: 1.0, 2: 1.1, 4: 1.2, 8: 1.4})
    guesses_of_lookup.heard((), 0)
    assert guesses_of_lookup.least_chances(2) == before


def test_looks_that_find_nothing_earn_nothing_however_quick_the_machine_becomes() -> None:
    pace = paced(0.05, 0.1, [True] * 20)
    looked = 0
    while pace.earns:
        looked += 1
        pace.stepped(1, 1, 1, 0.1, 0.5)
    assert looked < 40


def test_plain_decoding_is_timed_again_when_all_steps_look_and_find_nothing() -> None:
    pace = paced(0.05, 0.1, [True] * 20)
    for _ in range(PLAIN_EVERY):
        assert pace.length(7) > 0
        pace.stepped(1, 1, 1, 0.0, 1.0)
        pace.stepped(8, 2, 0, 0.0, 1.0)
    assert pace.length(7) == 0


def test_what_was_measured_long_ago_is_no_measure_of_what_drafts_earn() -> None:
    pace = Pace()
    pace.measured({1: 9.0, 2: 9.1, 4: 9.2, 8: 9.4})  # something else was running
    pace.draft_measured(0.0, 0.1)
    for _ in range(40):
        if pace.length(7):
            pace.passed(4, 3.0)
            pace.stepped(2, 4, 3, 0.3, 3.0)
        else:
            pace.passed(1, 1.0)
    assert pace.pass_seconds(1) == pytest.approx(1.0, rel=0.1)
    assert not pace.earns
