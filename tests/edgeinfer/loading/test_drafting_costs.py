"""Stored drafting costs."""

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from edgeinfer.loading.drafting_costs import begin_drafting
from edgeinfer.speculation.draft_controller import DraftController, DraftStats
from edgeinfer.speculation.draft_costs import MeasuredCosts
from edgeinfer.speculation.speculator import KINDS
from edgeinfer_offload.machine.measured_figures import MeasuredFigures

COSTS = MeasuredCosts({1: 0.010, 8: 0.015, 4: 0.012}, 0.001, 0.0002, 0.0006)


class CountingSpeculator:
    """Counts its measurements."""

    def __init__(self, costs: MeasuredCosts) -> None:
        self._costs = costs
        self.measured = 0
        self.costs: MeasuredCosts | None = None
        self.controllers = {kind: DraftController() for kind in KINDS}
        self.on_close: Callable[[], None] = lambda: None

    def measure(self) -> MeasuredCosts:
        self.measured += 1
        return self._costs

    def begin(self, costs: MeasuredCosts, stats: Mapping[str, DraftStats]) -> None:
        self.costs = costs
        for kind, known in stats.items():
            self.controllers[kind].begin(known)


def speculator_with(
    folder: Path, costs: MeasuredCosts, of: str = "a pair", machine: str = "m"
) -> CountingSpeculator:
    speculator = CountingSpeculator(costs)
    begin_drafting(speculator, MeasuredFigures(folder, machine), of)  # type: ignore[arg-type]
    return speculator


def test_costs_are_measured_at_the_first_load_and_read_from_the_cache_later(tmp_path: Path) -> None:
    first, second = speculator_with(tmp_path, COSTS), speculator_with(tmp_path, MeasuredCosts({1: 9.0}))
    assert (first.measured, second.measured) == (1, 0)
    assert first.costs == second.costs == COSTS


def test_noisy_costs_are_used_but_not_stored(tmp_path: Path) -> None:
    odd = MeasuredCosts({1: 0.010, 2: 0.070, 4: 0.041}, 0.001)
    first, second = speculator_with(tmp_path, odd), speculator_with(tmp_path, COSTS)
    assert (first.measured, second.measured) == (1, 1)
    assert (first.costs, second.costs) == (odd, COSTS)


def test_invalid_stored_costs_are_measured_again(tmp_path: Path) -> None:
    speculator_with(tmp_path, COSTS)
    measurements = MeasuredFigures(tmp_path, "m")
    measurements.keep({"a pair: pass of 4": 0.05})
    assert speculator_with(tmp_path, COSTS).measured == 1
    assert speculator_with(tmp_path, COSTS).measured == 0


def test_a_drafter_without_drafts_is_stored_as_such(tmp_path: Path) -> None:
    silent = MeasuredCosts({1: 0.010, 8: 0.015})
    speculator_with(tmp_path, silent)
    again = speculator_with(tmp_path, COSTS)
    assert again.measured == 0
    assert again.costs == silent


def test_another_pair_or_machine_is_measured_again(tmp_path: Path) -> None:
    speculator_with(tmp_path, COSTS)
    assert speculator_with(tmp_path, COSTS, of="another pair").measured == 1
    assert speculator_with(tmp_path, COSTS, machine="another").measured == 1


def test_stored_draft_statistics_continue_per_request_kind(tmp_path: Path) -> None:
    stats, first = DraftStats(0.9, 1.5, -0.25), speculator_with(tmp_path, COSTS)
    first.controllers["greedy"].begin(stats)
    first.on_close()
    again, other = speculator_with(tmp_path, COSTS), speculator_with(tmp_path, COSTS, of="another pair")
    assert again.controllers["greedy"].stats == stats
    assert again.controllers["sampled"].stats == other.controllers["greedy"].stats == DraftController().stats


def test_requests_of_another_kind_leave_draft_statistics_unchanged(tmp_path: Path) -> None:
    stats, first = DraftStats(0.9, 1.5, 0.5), speculator_with(tmp_path, COSTS)
    first.controllers["greedy"].begin(stats)
    first.on_close()
    second = speculator_with(tmp_path, COSTS)
    second.controllers["sampled"].begin(DraftStats(0.5, 1.0, -2.0))
    second.on_close()
    assert speculator_with(tmp_path, COSTS).controllers["greedy"].stats == stats


def test_a_model_closes_even_if_statistics_cannot_be_written(tmp_path: Path) -> None:
    first = speculator_with(tmp_path / "cache", COSTS)
    first.controllers["greedy"].begin(DraftStats(0.9, 1.5, 0.5))
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_bytes(b"")
    first.on_close()
    assert (tmp_path / "cache").is_file()
