"""The draft controller with assumed costs: it drafts if that is profitable."""

import random
from collections.abc import Callable
from dataclasses import astuple

import pytest

from edgeinfer.speculation.draft_controller import (
    MAX_DEFICIT,
    PROBE_CREDIT,
    PROBE_SHARE,
    RUN_SECONDS,
    Acceptance,
    DraftController,
    expected_tokens,
)
from edgeinfer.speculation.draft_costs import (
    BASELINE_RUN,
    MAX_DRAFTED,
    MeasuredCosts,
)

ROWS = {rows: 1 + 0.08 * (rows - 1) for rows in range(1, 9)}


def new_controller(each: float = 0.2, rows: dict[int, float] = ROWS) -> DraftController:
    """A controller that has the costs and has timed the baseline of one second."""
    controller = DraftController()
    controller.costs.begin(MeasuredCosts(rows, each, each / 2))
    for _ in range(BASELINE_RUN):
        assert controller.length(MAX_DRAFTED) == 0
        controller.record_baseline(1.0)
    return controller


def profitable() -> DraftController:
    controller = new_controller()
    for _ in range(20):
        controller.record_step(5, 6, 5, 1.1, 1.4)
        controller.record_accepted(5, 4)
    assert controller.is_profitable
    return controller


def speed(controller: DraftController, acceptance: Callable[[int], float], tokens: int, each: float) -> float:
    """Tokens per second of a simulated completion; baseline decoding gives 1."""
    rng, made, seconds = random.Random(5), 0, 0.0
    while made < tokens:
        length = 0
        if controller.cooldown_tokens:
            controller.cooldown_tokens -= 1
        else:
            length = controller.length(MAX_DRAFTED)
            if not length:
                controller.record_baseline(1.0)
        if not length:
            made, seconds = made + 1, seconds + 1.0
            continue
        accepted = next((n for n in range(length) if rng.random() > acceptance(made + n)), length)
        draft, forward = each * (length + 0.5), 1 + 0.08 * length
        controller.record_step(accepted + 1, 1 + length, length, draft, forward)
        controller.record_accepted(length, accepted, [0.8] * length)
        made, seconds = made + accepted + 1, seconds + draft + forward
    return made / seconds


def test_nothing_is_drafted_before_the_baseline_is_timed() -> None:
    assert DraftController().length(7) == 0
    assert DraftController().min_probs(3)[0] < 1


@pytest.mark.parametrize(("acceptance", "at_least"), [(0.9, 1.7), (0.75, 1.15), (0.6, 0.98)])
def test_profitable_drafting_is_used(acceptance: float, at_least: float) -> None:
    assert speed(new_controller(0.15), lambda _: acceptance, 1000, 0.15) > at_least


@pytest.mark.parametrize("each", [0.02, 0.2, 1.0])
def test_a_useless_drafter_costs_little(each: float) -> None:
    controller = new_controller(each)
    assert speed(controller, lambda _: 0.0, 500, each) > 0.97
    assert speed(controller, lambda _: 0.0, 500, each) > 0.98


def test_drafting_starts_if_the_text_becomes_predictable() -> None:
    controller = new_controller(0.15)
    speed(controller, lambda _: 0.0, 500, 0.15)
    assert speed(controller, lambda _: 0.9, 2000, 0.15) > 1.4


def test_drafting_stops_if_the_text_becomes_unpredictable() -> None:
    controller = new_controller(0.15)
    speed(controller, lambda _: 0.9, 300, 0.15)
    assert speed(controller, lambda _: 0.0, 1000, 0.15) > 0.95


def test_costs_measured_under_load_do_not_mislead() -> None:
    controller = DraftController()
    controller.costs.begin(MeasuredCosts({rows: 3 * cost for rows, cost in ROWS.items()}, 0.45, 0.2))
    assert speed(controller, lambda _: 0.9, 1000, 0.15) > 1.6


def test_the_length_is_limited() -> None:
    controller = profitable()
    assert [controller.length(limit) for limit in (-1, 0, 1)] == [0, 0, 1]
    assert 1 < controller.length(100) <= MAX_DRAFTED


@pytest.mark.parametrize(("prob", "longest"), [(0.8, 7), (0.999, 5)])
def test_a_drafter_that_is_too_sure_ends_no_draft_in_time(prob: float, longest: int) -> None:
    """A token of this probability is accepted in four of five cases."""
    controller = DraftController()
    controller.costs.begin(MeasuredCosts({1: 1.0, 2: 1.2, 4: 1.6, 8: 2.4}, 0.02))
    for _ in range(BASELINE_RUN):
        controller.record_baseline(1.0)
    for index in range(400):
        controller.record_step(1.8, 2, 1, 0.02, 1.2)
        controller.record_accepted(1, int(index % 5 > 0), [prob])
    for _ in range(BASELINE_RUN):
        controller.record_baseline(1.0)
    best = controller.length(MAX_DRAFTED)
    assert (best, controller.longest(best, MAX_DRAFTED)) == (4, longest)


def test_probabilities_of_0_give_no_longer_drafts() -> None:
    controller = profitable()
    for _ in range(50_000):
        controller.record_accepted(1, 0, [0.0])
    assert controller.longest(1, MAX_DRAFTED) == 1


def test_a_run_has_as_many_drafts_as_take_a_few_milliseconds() -> None:
    controller = profitable()
    assert controller.cycles(1) == 0  # a forward takes a second
    baseline = RUN_SECONDS / 6.5
    rows = {count: seconds * baseline for count, seconds in ROWS.items()}
    controller.costs.begin(MeasuredCosts(rows, 0.2 * baseline, 0.1 * baseline))
    assert controller.costs.baselines_due
    assert controller.cycles(1) == 0
    for _ in range(BASELINE_RUN):
        controller.record_baseline(baseline)
    assert [controller.cycles(length) for length in (0, 1, 5)] == [6, 4, 2]


def test_a_run_loses_no_more_than_drafting_may_lose_at_once() -> None:
    controller = profitable()
    controller.costs.begin(MeasuredCosts(dict.fromkeys((1, 8), RUN_SECONDS / 50), RUN_SECONDS / 50, 0.0))
    for _ in range(BASELINE_RUN):
        controller.record_baseline(RUN_SECONDS / 50)
    controller.account = PROBE_CREDIT + 0.1  # a draft of three tokens loses three at most
    assert controller.cycles(3) == int((PROBE_CREDIT + 0.1 + MAX_DEFICIT) / 3)
    controller.account = PROBE_CREDIT
    assert controller.cycles(3) == 0


def test_the_first_draft_is_a_short_probe() -> None:
    controller = new_controller()
    assert controller.length(7) == 1
    controller.record_step(3, 3, 2, 0.5, 1.16)
    assert controller.length(7) >= 1


def test_the_first_draft_is_not_shortened_to_one_that_gains_little() -> None:
    """With a high cost of each draft, however long, one token hardly pays and five do."""
    controller = DraftController()
    controller.costs.begin(MeasuredCosts({1: 1.0, 2: 1.25, 4: 1.5, 8: 2.0}, 0.1, 0.3))
    for _ in range(BASELINE_RUN):
        controller.record_baseline(1.0)
    assert 1 < controller.length(7) < 5


def test_the_cooldown_limits_the_cost_of_failed_probes() -> None:
    controller = new_controller()
    controller.record_step(1, 3, 2, 0.5, 1.16)
    for _ in range(10):
        controller.record_accepted(2, 0)
    assert controller.length(7) == 0
    lost = 0.66 - PROBE_SHARE * (1 + BASELINE_RUN)
    assert controller.cooldown_tokens == pytest.approx(lost / PROBE_SHARE, abs=2)


H100_ROWS = {1: 1.0, 2: 1.1, 4: 1.41, 8: 2.25}


def reject(controller: DraftController) -> int:
    """A draft none of whose tokens is accepted; its length."""
    length = controller.length(7)
    if length:
        draft, forward = 0.1 + 0.2 * length, controller.costs.forward(1 + length)
        controller.record_step(1, 1 + length, length, draft, forward)
        controller.record_accepted(length, 0)
    return length


def test_the_first_drafts_that_fail_are_few_and_short() -> None:
    controller = new_controller(0.2, H100_ROWS)
    lengths = list(iter(lambda: reject(controller), 0))
    assert lengths == [1] * len(lengths)
    assert 2 < len(lengths) < 6


def test_the_first_rejections_do_not_end_drafts_as_published() -> None:
    controller = new_controller(0.2, H100_ROWS)
    assert reject(controller) == reject(controller) == 1
    assert controller.length(7) > 0


def paused() -> DraftController:
    """A controller after a pause that failed drafts caused."""
    controller = new_controller()
    while reject(controller):
        pass
    controller.cooldown_tokens = 0
    while controller.costs.baselines_due:
        controller.record_baseline(1.0)
    return controller


def test_what_the_drafter_reads_after_a_pause_is_no_cost_of_a_draft_but_makes_the_next_pause_longer() -> None:
    pauses = list[int]()
    for missed in (0.0, 10.0):
        controller = paused()
        each = controller.costs.each
        assert controller.length(7) == 1
        controller.record_step(2, 2, 1, 0.3 + missed, controller.costs.forward(2))
        controller.record_accepted(1, 1)
        assert controller.length(7) == 1
        assert controller.costs.each == each
        while reject(controller):
            pass
        pauses.append(controller.cooldown_tokens)
    assert pauses[1] == pytest.approx(pauses[0] + 10 / PROBE_SHARE, abs=2)


def test_further_tokens_that_are_right_less_often_are_drafted_less() -> None:
    rows = {count: 1 + 0.03 * (count - 1) for count in range(1, 9)}
    falling, even = new_controller(0.02, rows), new_controller(0.02, rows)
    rng = random.Random(3)
    for _ in range(300):
        accepted = next((n for n in range(7) if rng.random() > 0.9 - 0.2 * n), 7)
        falling.record_step(accepted + 1, 8, 7, 0.15, 1.21)
        falling.record_accepted(7, accepted)
        even.record_step(accepted + 1, 8, 7, 0.15, 1.21)
        for level in range(min(accepted + 1, 7)):
            even.record_node(0, accepted=level < accepted)
    for controller in (falling, even):
        while controller.costs.baselines_due:
            controller.record_baseline(1.0)
    assert falling.acceptance == even.acceptance
    assert falling.length(7) < even.length(7)


def test_the_acceptance_of_each_level_is_learned() -> None:
    acceptance, rng = Acceptance(), random.Random(1)
    levels = (0.9, 0.7, 0.4)
    for _ in range(2000):
        for level, rate in enumerate(levels):
            accepted = rng.random() < rate
            acceptance.record(level, accepted=accepted)
            if not accepted:
                break
    shares = acceptance.shares
    assert shares[0] > shares[1] > shares[2] == pytest.approx(shares[6], abs=0.01)
    tokens = expected_tokens(0.75, shares)
    assert tokens[:3] == pytest.approx([1, 1.9, 1.9 + 0.63], abs=0.25)
    acceptance.record(20, accepted=True)
    assert expected_tokens(0.9, [2.0, 1.0])[1] == 2.0
    assert Acceptance().shares == [1.0] * MAX_DRAFTED


def test_a_step_that_could_not_start_ahead_costs_what_it_takes_longer() -> None:
    """A drafter that finds nothing at once: on a GPU, the steps without a draft wait for the host."""
    controller, steps = new_controller(), 0
    while controller.length(7) and steps < 1000:
        controller.record_step(1, 1, 1, 1e-5, 1.15)
        steps += 1
    assert 10 < steps < 40
    assert controller.cooldown_tokens > 100


def test_a_disturbed_step_is_no_evidence_against_drafting() -> None:
    controller = profitable()
    controller.record_step(5, 6, 5, 1.1, 90.0)
    assert controller.is_profitable


def test_drafts_that_are_empty_count_as_cost() -> None:
    controller = profitable()
    for _ in range(40):
        controller.record_step(1, 1, 1, 0.3, 1.0)
    assert not controller.is_profitable


def test_a_costly_draft_token_must_be_more_probable() -> None:
    cheap, costly = new_controller(0.05), new_controller(0.5)
    assert cheap.min_probs(4)[1] < costly.min_probs(4)[1]
    assert cheap.min_probs(4)[0] == costly.min_probs(4)[0]
    for controller in (cheap, costly):
        assert all(0 <= prob <= 1 for prob in controller.min_probs(7))


def test_the_drafters_probabilities_are_calibrated() -> None:
    calibrated, overconfident = new_controller(), new_controller()
    before = calibrated.min_probs(2)
    for index in range(200):
        calibrated.record_accepted(2, 2 if index % 5 else 0, [0.3, 0.3])
        overconfident.record_accepted(2, index % 2, [0.9, 0.9])
    assert calibrated.min_probs(2)[0] < before[0] < overconfident.min_probs(2)[0]


def test_stored_statistics_continue() -> None:
    controller, again = profitable(), new_controller()
    again.begin(controller.stats)
    assert again.is_profitable
    assert 1 < again.length(7) <= MAX_DRAFTED
    assert astuple(again.stats) == pytest.approx(astuple(controller.stats))


def test_a_cooldown_continues_in_another_process() -> None:
    controller, again = new_controller(), new_controller()
    controller.record_step(1, 3, 2, 1.5, 1.16)
    for _ in range(10):
        controller.record_accepted(2, 0)
    assert controller.length(7) == 0
    again.begin(controller.stats)
    assert again.length(7) == 0
    assert again.cooldown_tokens == pytest.approx(controller.cooldown_tokens, abs=1)


def speed_of_several(
    controller: DraftController, acceptances: list[float], steps: int, each: float, row: float
) -> float:
    """Tokens per second of simulated texts that are decoded together; baseline decoding gives 1. A further
    row takes `row` seconds.
    """
    rng, texts = random.Random(7), len(acceptances)
    made = seconds = 0.0
    plain = 1 + row * (texts - 1)
    for _ in range(steps):
        if controller.cooldown_tokens:
            controller.cooldown_tokens -= 1
            lengths = [0] * texts
        else:
            lengths = controller.lengths([MAX_DRAFTED] * texts, acceptances, 16)
            if not any(lengths):
                controller.record_baseline(plain, texts)
        accepted = [
            next((at for at in range(length) if rng.random() > acceptance), length)
            for length, acceptance in zip(lengths, acceptances, strict=True)
        ]
        tokens = texts + sum(accepted)
        made += tokens
        if not any(lengths):
            seconds += plain
            continue
        rows, draft = texts + sum(lengths), each * (max(lengths) + 0.5)
        forward = 1 + row * (rows - 1)
        controller.record_step(tokens, rows, max(lengths), draft, forward, texts)
        for length, kept in zip(lengths, accepted, strict=True):
            if length:
                controller.record_accepted(length, kept)
        seconds += draft + forward
    return made * plain / (texts * seconds)


@pytest.mark.parametrize("texts", [2, 4, 12])
def test_useless_drafts_of_several_texts_cost_almost_nothing(texts: int) -> None:
    assert speed_of_several(new_controller(), [0.0] * texts, 3000, 0.2, 0.08) > 0.98


@pytest.mark.slow
def test_good_drafts_of_several_texts_are_used_while_further_rows_are_cheap() -> None:
    rows = {rows: 1 + 0.04 * (rows - 1) for rows in range(1, 9)}
    assert speed_of_several(new_controller(0.05, rows), [0.8] * 2, 2000, 0.05, 0.04) > 1.9
    assert speed_of_several(new_controller(0.05, rows), [0.8] * 4, 2000, 0.05, 0.04) > 1.5
    dear = {rows: 1 + 0.9 * (rows - 1) for rows in range(1, 9)}
    assert speed_of_several(new_controller(0.05, dear), [0.8] * 4, 2000, 0.05, 0.9) > 0.98


def test_rows_go_to_the_texts_whose_drafts_are_accepted() -> None:
    controller = profitable()
    lengths = controller.lengths([7, 7, 0, 7], [0.9, 0.2, 0.9, 0.9], 12)
    assert lengths[2] == 0
    assert lengths[0] == lengths[3] > lengths[1]
    assert 4 + sum(lengths) <= 12
    assert controller.lengths([7] * 16, [0.9] * 16, 16) == [0] * 16
