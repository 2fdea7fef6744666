"""How long a draft should be, by made-up costs."""

from collections.abc import Callable

import pytest

from edgeinfer.speculation.draft_controller import (
    ALLOWANCE,
    EVIDENCE,
    FIRST_LENGTH,
    FIRST_PURSE,
    TRIALS,
    DraftController,
)
from edgeinfer.speculation.draft_costs import MAX_DRAFTED, PLAIN_EVERY, PLAIN_RUN, MeasuredCosts


def paced(row: float, draft: float, stands: list[bool], earns: bool = True) -> DraftController:
    """A pass of n tokens takes 1 + row·(n - 1) seconds; guesses stood as given."""
    pace = DraftController()
    for _ in range(50):
        for rows in (*range(2, MAX_DRAFTED + 2), *[1] * PLAIN_RUN):
            pace.costs.passed(rows, 1 + row * (rows - 1))
        pace.costs.drafted(4, 4 * draft)
    for stood in stands:
        pace.judged(1, int(stood))
    if earns:
        for _ in range(EVIDENCE):
            pace.stepped(8, 1, 0, 0.0, 1.0)
    assert pace.earns == earns
    return pace


def test_nothing_is_drafted_before_a_plain_pass_was_seen() -> None:
    assert DraftController().length(7) == 0


@pytest.mark.parametrize(
    ("row", "draft", "share", "least", "most"),
    [
        (0.05, 0.1, 9, 4, 7),  # nine of ten stand, drafts are cheap
        (0.05, 0.1, 5, 1, 2),
        (0.05, 0.4, 3, FIRST_LENGTH, FIRST_LENGTH),  # a trial
        (0.9, 0.1, 9, FIRST_LENGTH, FIRST_LENGTH),  # a pass of two costs nearly as much as two
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
    assert [pace.length(room) for room in (-1, 0, 1, 3, 100)] == [0, 0, 1, 3, MAX_DRAFTED]


def test_drafting_goes_on_when_guesses_would_stand_again() -> None:
    pace = paced(0.05, 0.1, [False] * 60)
    assert pace.length(7) == FIRST_LENGTH  # a trial
    for _ in range(25):
        pace.judged(1, 1)
    assert pace.length(7) >= 3


def test_a_useless_draft_is_given_up_after_its_first_step() -> None:
    pace = begun({1: 1.0, 2: 1.2, 4: 1.6, 8: 2.4})
    pace.costs.each = 0.2
    assert pace.length(7) == FIRST_LENGTH
    pace.stepped(1, 3, 2, 0.4, 1.4)
    for _ in range(4):
        pace.judged(2, 0)
    assert pace.length(7) == 0
    assert pace.rest == pytest.approx((0.8 - FIRST_PURSE) / ALLOWANCE - PLAIN_RUN, abs=2)


def test_rows_together_are_never_taken_to_cost_more_than_one_by_one() -> None:
    pace = DraftController()
    pace.costs.measured(MeasuredCosts({1: 1.0, 2: 7.0, 4: 3.0, 8: 0.5}))
    assert [pace.costs.of_pass(rows) for rows in (1, 2, 4, 8)] == [1.0, 2.0, 3.0, 1.0]


def test_costs_between_and_beyond_the_measured_ones_lie_on_a_line() -> None:
    pace = DraftController()
    pace.costs.passed(1, 1.0)
    assert pace.costs.of_pass(3) == pytest.approx(1.16)
    pace.costs.measured(MeasuredCosts({1: 1.0, 5: 2.0}))
    assert pace.costs.of_pass(3) == pytest.approx(1.5)
    assert pace.costs.of_pass(7) == pytest.approx(2.16)


def test_a_disturbed_pass_weighs_less_than_a_quick_one() -> None:
    pace = DraftController()
    pace.costs.passed(1, 1.0)
    pace.costs.passed(1, 3.0)
    assert pace.costs.of_pass(1) == pytest.approx(1.2)
    pace.costs.passed(1, 0.8)
    assert pace.costs.of_pass(1) == pytest.approx(1.0)


def test_a_machine_that_slows_down_slows_all_passes_alike() -> None:
    pace = paced(0.1, 0.1, [True] * 20)
    length = pace.length(7)
    for _ in range(60):
        pace.costs.passed(1, 2.0)
    assert pace.costs.of_pass(5) == pytest.approx(2 * 1.4, rel=0.02)
    pace.costs.drafted(4, 0.8)
    assert abs(pace.length(7) - length) <= 1


def test_what_rows_cost_beside_one_is_learnt_from_passes_of_so_many() -> None:
    pace = DraftController()
    pace.costs.measured(MeasuredCosts({1: 1.0, 4: 1.3, 8: 1.6}))
    for _ in range(80):
        pace.costs.passed(4, 2.0)
        for _ in range(PLAIN_RUN):
            pace.costs.passed(1, 1.0)
    assert pace.costs.of_pass(4) == pytest.approx(2.0, rel=0.05)
    assert pace.costs.of_pass(1) == pytest.approx(1.0, rel=0.05)


def test_now_and_then_passes_are_made_without_a_draft() -> None:
    pace, lengths = paced(0.05, 0.1, [True] * 20), []
    for _ in range(PLAIN_EVERY + PLAIN_RUN + 1):
        lengths.append(pace.length(7))
        if lengths[-1]:
            pace.stepped(4, 1 + lengths[-1], lengths[-1], 0.1 * lengths[-1], 1 + 0.05 * lengths[-1])
        else:
            pace.passed(1.0)
    assert [length > 0 for length in lengths] == [
        *[True] * (PLAIN_EVERY - EVIDENCE),
        *[False] * PLAIN_RUN,
        *[True] * (1 + EVIDENCE),
    ]


def test_rows_that_were_dear_for_a_while_are_tried_again() -> None:
    pace = DraftController()
    pace.costs.measured(MeasuredCosts({1: 1.0, 2: 1.1, 4: 1.2, 8: 1.4}))
    pace.costs.each = 0.1
    for _ in range(40):
        for rows in range(2, 9):
            pace.costs.passed(rows, 9.0)
    tried = 0
    for _ in range(1000):
        tried += decoded(pace, lambda length: 1 + length, lambda length: 0.3 * length)
    assert tried > 100
    assert pace.earns


def test_a_token_must_be_likely_enough_to_be_worth_its_cost() -> None:
    cheap, dear = paced(0.02, 0.05, [True] * 20), paced(0.02, 0.5, [True] * 20)
    assert all(a < b for a, b in zip(cheap.further_chances(4), dear.further_chances(4), strict=True))
    assert cheap.least_chances(4) == dear.least_chances(4)  # what has been guessed costs its row only
    for chances in (dear.least_chances(7), dear.further_chances(7)):
        assert len(chances) == 7
        assert all(0 <= chance <= 1 for chance in chances)
    assert DraftController().least_chances(3) == DraftController().further_chances(3) == [0.0] * 3


def begun(rows: dict[int, float]) -> DraftController:
    """A pace that has been told what passes cost, and has seen plain ones."""
    pace = DraftController()
    pace.costs.measured(MeasuredCosts(rows))
    for _ in range(PLAIN_RUN):
        assert pace.length(7) == 0
        pace.passed(rows[1])
    return pace


def decoded(pace: DraftController, tokens: Callable[[int], int], more: Callable[[int], float]) -> int:
    """One step, with a draft if one is wanted: how long it was. It gives `tokens(length)` and takes
    `more(length)` seconds more than a plain one, of one second; half of them go to the guesses.
    """
    if pace.rest:
        pace.rest -= 1
        return 0
    length = pace.length(7)
    if length:
        pace.stepped(tokens(length), 1 + length, length, more(length) / 2, 1 + more(length) / 2)
        pace.judged(length, tokens(length) - 1)
    else:
        pace.passed(1.0)
    return length


def certain(rows: dict[int, float]) -> DraftController:
    """A pace whose guesses have all stood, with passes that cost so much."""
    pace = begun(rows)
    for _ in range(50):
        pace.judged(4, 4)
    pace.costs.drafted(4, 0.4)
    return pace


def steps(pace: DraftController, count: int, tokens: int, seconds: float) -> None:
    """Steps whose drafts of four took a tenth of the time that their passes of four rows did."""
    for _ in range(count):
        pace.stepped(tokens, 4, 4, seconds / 11, 10 * seconds / 11)


def test_the_first_draft_of_all_is_short_and_the_next_as_long_as_it_promises() -> None:
    pace = certain({1: 1.0, 2: 1.1, 4: 1.2, 8: 1.4})
    assert pace.length(7) == FIRST_LENGTH
    steps(pace, 1, 3, 1.3)
    assert pace.length(7) > FIRST_LENGTH


def wasted(pace: DraftController, tokens: int, missed: float) -> float:
    """What drafts none of which stands cost in so many passes, beyond plain decoding; `missed` seconds go to
    reading what the drafter had missed when nothing has been drafted for eight tokens.
    """
    lost, since = 0.0, 64

    def more(length: int) -> float:
        return 0.12 * length + (missed if since > 8 else 0.0)

    for _ in range(tokens):
        since += 1
        length = decoded(pace, lambda length: 1, more)
        if length:
            lost, since = lost + more(length), 0
    return lost


@pytest.mark.parametrize("missed", [0.0, 1.0, 5.0])
def test_a_useless_draft_costs_little_however_much_it_has_to_read(missed: float) -> None:
    pace = begun({1: 1.0, 2: 1.06, 4: 1.18, 8: 1.42})
    pace.costs.each = 0.06
    # The very first trial reads what was missed as an investment, and one trial may be paid for afterwards.
    assert wasted(pace, 48, missed) <= 0.02 * 48 + 2 * missed + 0.3
    for _ in range(10):
        pace.judged(1, 1)  # as if the drafter had looked better for a while
        assert wasted(pace, 500, missed) <= 0.02 * 500 + missed


def test_trials_go_on_while_they_give_more_than_they_take() -> None:
    pace = begun({1: 1.0, 2: 1.2, 4: 1.6, 8: 2.4})
    pace.costs.each = 0.2
    # What the first one takes doesn't tell: other work has driven from the caches what it needs.
    for tokens, looked in ((2, 4.0), (2, 0.2), (2, 0.2), (1, 0.4), (1, 0.4)):
        assert pace.length(7) > 0
        pace.stepped(tokens, 3, 2, looked, 1.4)
    for _ in range(4):
        pace.judged(2, 0)
    assert pace.length(7) == 0


def test_four_drafts_are_tried_while_they_promise_to_pay() -> None:
    pace = certain({1: 1.0, 2: 1.1, 4: 1.2, 8: 1.4})
    tried = 0
    while pace.length(7):
        steps(pace, 1, 1, 1.6)
        tried += 1
    assert tried == TRIALS


def test_a_rest_is_as_long_as_its_tokens_save_what_trials_took() -> None:
    pace, rests = begun({1: 1.0, 2: 1.2, 4: 1.6, 8: 2.4}), []
    pace.costs.each = 0.2
    for _ in range(3):
        while not pace.rest:
            decoded(pace, lambda length: 1, lambda length: 0.4 * length)
        rests.append(pace.rest)
        pace.rest = 0
    assert rests[1:] == [pytest.approx(0.8 / ALLOWANCE, abs=PLAIN_RUN + 1)] * 2


def test_what_was_learnt_is_gone_on_from() -> None:
    pace, again = certain({1: 1.0, 2: 1.1, 4: 1.2, 8: 1.4}), begun({1: 1.0, 2: 1.1, 4: 1.2, 8: 1.4})
    pace.length(7)
    steps(pace, 30, 3, 1.6)
    again.begin(pace.learnt)
    again.costs.drafted(4, 0.4)
    assert again.earns
    assert again.length(7) > FIRST_LENGTH
    assert again.learnt == pace.learnt


def test_a_rest_goes_on_in_another_process() -> None:
    pace, again = begun({1: 1.0, 2: 1.2, 4: 1.6, 8: 2.4}), begun({1: 1.0, 2: 1.2, 4: 1.6, 8: 2.4})
    pace.length(7)
    pace.stepped(1, 3, 2, 0.4, 2.4)
    for _ in range(4):
        pace.judged(2, 0)
    assert pace.length(7) == 0
    rest = pace.rest
    pace.rest -= 10
    again.begin(pace.learnt)
    assert again.length(7) == 0
    assert again.rest == pytest.approx(rest - 10, abs=1)


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
        pace.stepped(2, 1, 0, 0.0, 1.0)
    assert pace.least_chances(3) == pytest.approx([0.2, 0.2, 0.2])


def test_what_a_draft_takes_whatever_its_length_makes_short_ones_pay_less() -> None:
    long, short = (certain({1: 1.0, 2: 1.1, 4: 1.3, 8: 1.7}) for _ in range(2))
    for pace in (long, short):
        steps(pace, EVIDENCE, 8, 1.4)
    long.costs.begin, long.costs.each = 1.0, 0.1
    short.costs.begin, short.costs.each = 0.0, 0.1
    for _ in range(8):
        for pace in (long, short):
            pace.judged(1, 0)
    assert long.length(7) == FIRST_LENGTH < short.length(7)


def test_a_pass_of_several_that_is_quicker_than_one_was_asks_what_one_takes_now() -> None:
    pace = paced(0.2, 0.1, [True] * 20)
    for _ in range(4):
        pace.costs.passed(4, 0.16)  # the machine has become ten times as fast
    for _ in range(PLAIN_RUN):
        assert pace.length(7) == 0
        pace.costs.passed(1, 0.1)
    assert pace.length(7) > 0
    assert pace.costs.of_pass(1) < 0.2
    assert pace.costs.of_pass(4) >= pace.costs.of_pass(1)


def test_a_pass_right_behind_a_draft_says_nothing_of_plain_decoding() -> None:
    pace = paced(0.2, 0.1, [True] * 20)
    for _ in range(50):
        pace.costs.passed(4, 1.6)
        pace.costs.passed(1, 3.0)
    assert pace.costs.of_pass(1) == pytest.approx(1.0)


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
    for _ in range((PLAIN_EVERY - EVIDENCE + 1) // 2):
        assert pace.length(7) > 0
        pace.stepped(1, 1, 1, 0.0, 1.0)
        pace.stepped(8, 2, 0, 0.0, 1.0)
    assert pace.length(7) == 0


def test_what_was_measured_long_ago_is_no_measure_of_what_drafts_earn() -> None:
    pace = DraftController()
    pace.costs.measured(MeasuredCosts({1: 9.0, 2: 9.1, 4: 9.2, 8: 9.4}))  # something else was running
    pace.costs.each = 0.1
    for _ in range(40):
        decoded(pace, lambda length: 2, lambda length: 2.3)
    assert pace.costs.of_pass(1) == pytest.approx(1.0, rel=0.1)
    assert not pace.earns
