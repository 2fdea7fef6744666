"""What passes and drafts of a model cost: measured when it is first loaded, then remembered."""

from edgeinfer.speculation.speculator import MEASURED_ROWS, DraftingCosts, Speculator
from edgeinfer_offload.remembered import RememberedFigures


def begin_drafting(speculator: Speculator, figures: RememberedFigures, of: str) -> None:
    """Give the speculator what is remembered `of` it, or what is measured now, some tenth of a second."""
    costs = _remembered(figures, of)
    if costs is None:
        costs = speculator.measure()
        _remember(figures, of, costs)
    speculator.begin(costs)


def _pass(of: str, rows: int) -> str:
    return f"{of}: pass of {rows}"


def _draft(of: str) -> str:
    return f"{of}: drafted token"


def _begun_draft(of: str) -> str:
    return f"{of}: draft"


def _remembered(figures: RememberedFigures, of: str) -> DraftingCosts | None:
    known = figures.known()
    passes = {rows: known[_pass(of, rows)] for rows in MEASURED_ROWS if _pass(of, rows) in known}
    if 1 not in passes:
        return None
    return DraftingCosts(passes, known.get(_draft(of)), known.get(_begun_draft(of), 0.0))


def _remember(figures: RememberedFigures, of: str, costs: DraftingCosts) -> None:
    found = {_pass(of, rows): seconds for rows, seconds in costs.passes.items()}
    if costs.drafted_token is not None:
        found[_draft(of)], found[_begun_draft(of)] = costs.drafted_token, costs.draft
    figures.keep(found)
