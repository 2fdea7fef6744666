"""`edgeinfer plan` and `load` make one decision: the same items in the same bytes, or the same error."""

from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer.errors import EdgeInferError
from edgeinfer.planning.model_plan import plan_model

DRAFT = Path(edgeinfer.__file__).parent / "builtin" / "edgeinfer-tiny-draft-5m-Q8_0.gguf"
Outcome = str | dict[tuple[str, Any], int]
BUDGETS = [("24MiB", DRAFT), ("40MiB", DRAFT), ("40MiB", "auto"), ("24MiB", "auto"), ("16MiB", None)]
BUDGETS += [("40MiB", "mtp"), ("24MiB", "mtp")]


def planned(settings: dict[str, Any]) -> Outcome:
    """The bytes per item of a plan, or its error."""
    try:
        plan = plan_model("tiny", **settings).plan
    except EdgeInferError as error:
        return str(error)
    return {(item.item, item.device): item.bytes for item in plan.items}


def loaded(settings: dict[str, Any]) -> Outcome:
    """The bytes per item of a loaded model, or the error."""
    try:
        with edgeinfer.load("tiny", **settings) as model:
            assert model.plan is not None
            drafts = model.speculator is not None and model.speculator.drafter.nbytes
            items = {(item.item, item.device): item.bytes for item in model.plan.items}
            planned = items.get(("draft model", "cpu"), 0) + items.get(("draft head", "cpu"), 0)
            assert planned == drafts
            return items
    except EdgeInferError as error:
        return str(error)


def settings_of(ram: str | None, context: int | None, draft: Any, kv: str, repack: bool) -> dict[str, Any]:
    return {"device": "cpu", "threads": 2, "ram": ram, "context": context, "draft": draft, "kv": kv} | {
        "repack": repack
    }


@pytest.mark.default_cases(1)
@pytest.mark.parametrize(("ram", "draft"), BUDGETS)
def test_a_plan_equals_the_loaded_placement(ram: str, draft: Any) -> None:
    settings = settings_of(ram, 240, draft, "f16", repack=True)
    assert planned(settings) == loaded(settings)


@pytest.mark.parametrize("parallel", [1, 6])
def test_a_draft_model_is_planned_for_all_requests(parallel: int) -> None:
    settings = settings_of(None, 240, DRAFT, "f16", repack=True) | {"parallel": parallel}
    items = planned(settings)
    assert items == loaded(settings)


@pytest.mark.slow
def test_a_plan_equals_the_loaded_placement_for_all_options_and_budgets(
    scaled: Callable[[int], int],
) -> None:
    """Every pair of values is in a third of the combinations, which `--attack-share` raises to all."""
    budgets = [None, "1", "16MiB", "20MiB", "24MiB", "32MiB", "40MiB"]
    drafts = ["auto", None, "lookup", "self", "mtp", DRAFT]
    different = []
    values: list[list[Any]] = [budgets, [None, 240, 100_000], drafts, ["f16", "q8_0"], [True, False]]
    for indices in product(*(range(len(each)) for each in values)):
        if sum(indices) % 3 >= scaled(3):
            continue
        settings = settings_of(*(each[index] for each, index in zip(values, indices, strict=True)))
        if planned(settings) != loaded(settings):
            different.append(settings)
    assert not different
