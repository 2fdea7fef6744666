"""Tests of remembering what drafting costs."""

from collections.abc import Callable, Mapping
from pathlib import Path

from edgeinfer.loading.drafting_costs import begin_drafting
from edgeinfer.speculation.draft_controller import DraftController, DraftStats
from edgeinfer.speculation.draft_costs import MeasuredCosts
from edgeinfer.speculation.speculator import KINDS
from edgeinfer_offload.machine.measured_figures import MeasuredFigures

COSTS = MeasuredCosts({1: 0.010, 8: 0.015, 4: 0.012}, 0.001)


class CountingSpeculator:
    """Counts how often it is asked to measure."""

    def __init__(self, costs: MeasuredCosts) -> None:
        self._costs = costs
        self.measured = 0
        self.begun: MeasuredCosts | None = None
        self.controllers = {kind: DraftController() for kind in KINDS}
        self.on_close: Callable[[], None] = lambda: None

    def measure(self) -> MeasuredCosts:
        self.measured += 1
        return self._costs

    def begin(self, costs: MeasuredCosts, learnt: Mapping[str, DraftStats]) -> None:
        self.begun = costs
        for kind, known in learnt.items():
            self.controllers[kind].begin(known)


def begun(folder: Path, costs: MeasuredCosts, of: str = "a pair", machine: str = "m") -> CountingSpeculator:
    speculator = CountingSpeculator(costs)
    begin_drafting(speculator, MeasuredFigures(folder, machine), of)  # type: ignore[arg-type]
    return speculator


def test_costs_are_measured_at_the_first_load_and_remembered_at_the_next(tmp_path: Path) -> None:
    first, second = begun(tmp_path, COSTS), begun(tmp_path, MeasuredCosts({1: 9.0}))
    assert (first.measured, second.measured) == (1, 0)
    assert first.begun == second.begun == COSTS


def test_costs_that_others_disturbed_are_used_and_not_remembered(tmp_path: Path) -> None:
    odd = MeasuredCosts({1: 0.010, 2: 0.070, 4: 0.041}, 0.001)
    first, second = begun(tmp_path, odd), begun(tmp_path, COSTS)
    assert (first.measured, second.measured) == (1, 1)
    assert (first.begun, second.begun) == (odd, COSTS)


def test_remembered_costs_that_cannot_be_are_measured_again(tmp_path: Path) -> None:
    begun(tmp_path, COSTS)
    figures = MeasuredFigures(tmp_path, "m")
    figures.keep({"a pair: pass of 4": 0.05})
    assert begun(tmp_path, COSTS).measured == 1
    assert begun(tmp_path, COSTS).measured == 0


def test_a_drafter_that_said_nothing_is_remembered_so(tmp_path: Path) -> None:
    silent = MeasuredCosts({1: 0.010, 8: 0.015})
    begun(tmp_path, silent)
    again = begun(tmp_path, COSTS)
    assert again.measured == 0
    assert again.begun == silent


def test_another_pair_and_another_machine_are_measured_anew(tmp_path: Path) -> None:
    begun(tmp_path, COSTS)
    assert begun(tmp_path, COSTS, of="another pair").measured == 1
    assert begun(tmp_path, COSTS, machine="another").measured == 1


def test_what_was_learnt_of_a_kind_of_answers_is_gone_on_from(tmp_path: Path) -> None:
    learnt, first = DraftStats(0.9, 1.5, 8.0, 5.0, -0.25), begun(tmp_path, COSTS)
    first.controllers["greedy"].begin(learnt)
    first.on_close()
    again, other = begun(tmp_path, COSTS), begun(tmp_path, COSTS, of="another pair")
    assert again.controllers["greedy"].stats == learnt
    assert again.controllers["sampled"].stats == other.controllers["greedy"].stats == DraftController().stats


def test_answers_of_another_kind_leave_what_was_learnt_as_it_is(tmp_path: Path) -> None:
    learnt, first = DraftStats(0.9, 1.5, 8.0, 5.0, 0.5), begun(tmp_path, COSTS)
    first.controllers["greedy"].begin(learnt)
    first.on_close()
    second = begun(tmp_path, COSTS)
    second.controllers["sampled"].begin(DraftStats(0.5, 1.0, 3.0, 5.0, -2.0))
    second.on_close()
    assert begun(tmp_path, COSTS).controllers["greedy"].stats == learnt


def test_a_model_is_closed_even_where_nothing_can_be_written(tmp_path: Path) -> None:
    first = begun(tmp_path / "cache", COSTS)
    first.controllers["greedy"].begin(DraftStats(0.9, 1.5, 8.0, 5.0, 0.5))
    (tmp_path / "cache" / "measured.json").unlink()
    (tmp_path / "cache").rmdir()
    (tmp_path / "cache").write_bytes(b"")
    first.on_close()
    assert (tmp_path / "cache").is_file()
