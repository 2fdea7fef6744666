"""What drafts and forwards are learned to cost."""

import pytest

from edgeinfer.speculation.draft_controller import DraftController
from edgeinfer.speculation.draft_costs import (
    BASELINE_EVERY,
    BASELINE_RUN,
    MAX_EVERY,
    DraftCosts,
    MeasuredCosts,
)

PASSES = {1: 1.0, 2: 1.2, 3: 1.35, 4: 1.5, 8: 2.0}
TRAINED_STEPS = 40


def trained(shift: float) -> DraftController:
    """A controller after drafts of three tokens, two right ones of each, whose forwards end early by
    `shift`, which their drafts take longer: a GPU may start a forward before the host waits for it.
    """
    controller = DraftController()
    controller.costs.begin(MeasuredCosts(PASSES, 0.1))
    for _ in range(BASELINE_RUN):
        controller.record_baseline(1.0)
    for _ in range(TRAINED_STEPS):
        controller.record_step(3, 4, 3, 0.3 + shift, 1.5 - shift)
        controller.record_accepted(3, 2)
    return controller


def test_time_that_a_draft_takes_over_from_its_forward_changes_nothing() -> None:
    usual, shifted = trained(0.0), trained(0.7)
    assert shifted.costs.baseline == pytest.approx(usual.costs.baseline)
    assert shifted.costs.steps(7) == pytest.approx(usual.costs.steps(7))
    assert shifted.account == pytest.approx(usual.account)
    assert shifted.length(7) == usual.length(7)


def test_slower_drafts_are_learned_with_their_forwards() -> None:
    costs = trained(0.0).costs
    before = costs.steps(3)[3]
    for _ in range(60):
        costs.record_step(4, 3, 0.6, 1.5)
    assert costs.steps(3)[3] == pytest.approx(2.1, rel=0.02)
    assert costs.steps(3)[3] > before
    assert costs.baseline == pytest.approx(1.0)


def test_a_forward_of_several_rows_bounds_the_time_of_one() -> None:
    costs = trained(0.0).costs
    for _ in range(20):
        costs.record_step(4, 3, 0.3, 0.8)
    assert costs.baseline is not None
    assert costs.baseline < 0.9
    assert costs.steps(3)[3] == pytest.approx(1.1, rel=0.02)


def test_costs_between_measured_ones_are_interpolated() -> None:
    costs = DraftCosts()
    costs.begin(MeasuredCosts({1: 2.0, 5: 4.0}))
    for _ in range(2):
        costs.record_baseline(1.0)
    assert costs.forward(3) == pytest.approx(1.5)
    assert costs.forward(7) == pytest.approx(2.16)
    costs.begin(MeasuredCosts({1: 1.0, 2: 7.0, 8: 0.5}))
    for _ in range(2):
        costs.record_baseline(1.0)
    assert (costs.forward(2), costs.forward(8)) == (2.0, 1.0)


def test_a_slower_host_scales_all_forward_times() -> None:
    costs = trained(0.0).costs
    before = costs.forward(4)
    for _ in range(60):
        costs.record_baseline(2.0)
    assert costs.forward(4) == pytest.approx(2 * before, rel=0.02)


def until_timed(controller: DraftController, seconds: float) -> int:
    """The number of steps with drafts until the baseline, which takes so long, is timed."""
    drafted = 0
    while controller.length(7):
        controller.record_step(3, 4, 3, 0.3 * seconds, 1.5 * seconds)
        drafted += 1
    for due in range(BASELINE_RUN, 0, -1):
        assert controller.costs.baselines_due == due
        assert controller.length(7) == 0
        controller.record_baseline(seconds)
    return drafted


def test_the_baseline_is_timed_again_and_less_often_while_it_stays_the_same() -> None:
    controller = trained(0.0)
    first = TRAINED_STEPS + until_timed(controller, 1.0)
    intervals = [first, *(until_timed(controller, 1.0) for _ in range(4))]
    assert intervals == [BASELINE_EVERY, 2 * BASELINE_EVERY, MAX_EVERY, MAX_EVERY, MAX_EVERY]
    assert until_timed(controller, 1.5) == MAX_EVERY
    assert until_timed(controller, 1.5) == BASELINE_EVERY
