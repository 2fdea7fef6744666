"""Costs of forwards and drafts of a model, measured on its first load, and stored draft statistics.

Both are stored, so that a new process starts with them.
"""

from contextlib import suppress
from dataclasses import asdict, fields

from edgeinfer.speculation.cost_measurement import MEASURED_ROWS, TREE_ROWS
from edgeinfer.speculation.draft_controller import DraftController, DraftStats
from edgeinfer.speculation.draft_costs import MeasuredCosts
from edgeinfer.speculation.speculator import KINDS, Speculator
from edgeinfer_offload.machine.measured_figures import MeasuredFigures

STATISTICS = tuple(field.name for field in fields(DraftStats))


def begin_drafting(speculator: Speculator, figures: MeasuredFigures, of: str) -> None:
    """Pass the stored costs `of` the model to the speculator, or measure them now in about a tenth of a
    second. If the measurement was disturbed, the next process repeats it.

    When the speculator is closed, its statistics are stored.
    """
    known = figures.known()
    costs = _stored_costs(known, of)
    if costs is None:
        costs = speculator.measure()
        if not costs.disturbed:
            _store_costs(figures, of, costs)
    stored = {kind: stats for kind in KINDS if (stats := _stats(known, of, kind)) is not None}
    speculator.begin(costs, stored)
    speculator.on_close = lambda: _store_stats(figures, of, speculator, stored)


def _forward(of: str, rows: int) -> str:
    return f"{of}: pass of {rows}"


def _draft(of: str) -> str:
    return f"{of}: drafted token"


def _draft_start(of: str) -> str:
    return f"{of}: draft"


def _short_token(of: str) -> str:
    return f"{of}: token of a short draft vocabulary"


def _of_kind(of: str, kind: str, name: str) -> str:
    return f"{of}: {kind}: {name}"


def _stored_costs(known: dict[str, float], of: str) -> MeasuredCosts | None:
    timed = (*MEASURED_ROWS, *TREE_ROWS)
    passes = {rows: known[_forward(of, rows)] for rows in timed if _forward(of, rows) in known}
    if 1 not in passes:
        return None
    drafted, start = known.get(_draft(of)), known.get(_draft_start(of), 0.0)
    costs = MeasuredCosts(passes, drafted, start, known.get(_short_token(of)))
    return None if costs.disturbed else costs


def _store_costs(figures: MeasuredFigures, of: str, costs: MeasuredCosts) -> None:
    figures_by_name = {_forward(of, rows): seconds for rows, seconds in costs.passes.items()}
    if costs.drafted_token is not None:
        figures_by_name[_draft(of)], figures_by_name[_draft_start(of)] = costs.drafted_token, costs.draft
    if costs.short_token is not None:
        figures_by_name[_short_token(of)] = costs.short_token
    figures.keep(figures_by_name)


def _stats(known: dict[str, float], of: str, kind: str) -> DraftStats | None:
    """The stored draft statistics of one kind of completion; None: incomplete."""
    values = [known.get(_of_kind(of, kind, name)) for name in STATISTICS]
    numbers = [number for number in values if number is not None]
    return DraftStats(*numbers) if len(numbers) == len(STATISTICS) else None


def _store_stats(
    figures: MeasuredFigures, of: str, speculator: Speculator, stored: dict[str, DraftStats]
) -> None:
    """Store the statistics of the kinds of completions that occurred."""
    values = dict[str, float]()
    for kind, controller in speculator.controllers.items():
        if controller.stats not in (DraftController().stats, stored.get(kind)):
            values |= {_of_kind(of, kind, name): value for name, value in asdict(controller.stats).items()}
    # On a full disk the next process starts with the same values as this one.
    with suppress(OSError):
        if values:
            figures.keep(values)
