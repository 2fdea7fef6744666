"""Chooses the format of each tensor so that a file reaches a goal with the least divergence."""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from edgeinfer.calibration.checkpoint import Checkpoint, file_key, run_key
from edgeinfer.calibration.goals import Budget, Goal, byte_budget, speed_budget
from edgeinfer.calibration.reference_model import reference_model
from edgeinfer.calibration.sensitivity import (
    CANDIDATES,
    Importances,
    Report,
    Sensitivity,
    bits,
    measure_sensitivities,
)
from edgeinfer.errors import SettingError
from edgeinfer.loading.loading import load
from edgeinfer.profiling.recording import generated_texts
from edgeinfer.user_folders import user_folder
from edgeinfer_quant_formats import FormatSpec, GGUFFile, block_format
from edgeinfer_quant_formats.gguf.tensor_index import TensorInfo
from edgeinfer_quant_formats.quantizer.importance_file import Importance
from edgeinfer_quant_formats.quantizer.knapsack import Options, select_options
from edgeinfer_quant_formats.quantizer.mixes import MIXES, Mix
from edgeinfer_quant_formats.quantizer.type_selection import Override

TOKENS, WINDOW = 512, 256
"""Tokens on which sensitivities are measured, and those of a window."""
BASE = "Q8_0"
"""The format of tensors whose sensitivity can't be measured, as those of a draft head."""


@dataclass(frozen=True)
class Fitted:
    """The formats that were selected, and the divergence in nats that the sensitivities predict for them."""

    mix: Mix
    overrides: tuple[Override, ...]
    divergence: float


def fit_types(
    model: str | Path,
    file: GGUFFile,
    goal: Goal,
    text: str | None = None,
    importance: Importance | None = None,
    excluded: Collection[str] = (),
    report: Report | None = None,
) -> Fitted:
    """The formats for an open file whose weights will be encoded with `importance`.

    Sensitivities are measured on `text`, or on text that the model generates, and kept in the user's cache: a
    run that was interrupted continues, and another goal needs no measurement. `excluded`: formats that no
    tensor gets.

    Raises:
        SettingError: a goal that no selection reaches.
    """
    reference = reference_model(file, WINDOW)
    windows = _generated(model) if text is None else reference.windows(text, TOKENS)
    given = {} if importance is None else _importances(file, importance)
    digests = [(name, run_key(values.tobytes())) for name, values in sorted(given.items())]
    key = run_key("sensitivity", file_key(file), windows, digests, CANDIDATES)
    saved = Checkpoint(user_folder("cache") / "sensitivity" / key[:32], key)
    found = measure_sensitivities(reference, windows, saved, given, report)
    found = [_without(each, excluded) for each in found]
    if goal.kind == "speed":
        budget = speed_budget(model, file, goal, [spec.name for each in found for spec in _formats(each)])
    else:
        budget = byte_budget(file, goal)
    return _selected(file, goal, budget, found)


def _without(sensitivity: Sensitivity, excluded: Collection[str]) -> Sensitivity:
    """The sensitivity without these formats."""
    kept = {name: value for name, value in sensitivity.divergences.items() if name not in excluded}
    return replace(sensitivity, divergences=kept)


def _generated(model: str | Path) -> list[list[int]]:
    """A text that the model generates, in windows."""
    with load(model, device="cpu", sparse="off", draft=None, context=WINDOW) as loaded:
        return generated_texts(loaded, TOKENS)


def _importances(file: GGUFFile, importance: Importance) -> Importances:
    """The importance of each tensor's columns, (matrices, columns)."""
    found: dict[str, npt.NDArray[np.float32]] = {}
    for name, info in file.tensors.items():
        values = importance.tensors.get(name)
        if values is not None and values.size == int(np.prod(info.shape[:-2])) * info.shape[-1]:
            found[name] = values.reshape(-1, info.shape[-1])
    return found


def _formats(sensitivity: Sensitivity) -> list[FormatSpec]:
    return [block_format(name) for name in sensitivity.divergences]


def _selected(file: GGUFFile, goal: Goal, budget: Budget, found: Sequence[Sensitivity]) -> Fitted:
    measured = {info.name for each in found for info in each.group.tensors}
    fixed = sum(budget.cost(info, info.format) for name, info in file.tensors.items() if name not in measured)
    options = [_options(each, budget) for each in found]
    selected = select_options(options, budget.total - fixed)
    if selected is None:
        least = fixed + sum(float(each.costs.min()) for each in options)
        raise SettingError(_unreachable(goal, budget, least))
    formats = [list(each.divergences)[index] for each, index in zip(found, selected, strict=True)]
    chosen = {
        info.name: block_format(name)
        for each, name in zip(found, formats, strict=True)
        for info in each.group.tensors
    }
    overrides = tuple(Override(re.compile(rf"^{re.escape(name)}$"), spec) for name, spec in chosen.items())
    divergence = sum(each.divergences[name] for each, name in zip(found, formats, strict=True))
    return Fitted(_mix(file.tensors, chosen), overrides, divergence)


def _options(sensitivity: Sensitivity, budget: Budget) -> Options:
    costs = [
        sum(budget.cost(info, spec) for info in sensitivity.group.tensors) for spec in _formats(sensitivity)
    ]
    return Options(np.array(costs, np.float64), np.array(list(sensitivity.divergences.values())))


def _unreachable(goal: Goal, budget: Budget, least: float) -> str:
    if goal.kind == "speed":
        other = 1 / goal.value - budget.total
        return f"goal: saw {goal}, wanted at most {1 / (least + other):,.3g}, which is reached with 2 bits"
    smallest = least / budget.total * goal.value if goal.kind == "bits" else goal.value + least - budget.total
    return f"goal: saw {goal}, wanted at least {Goal(goal.kind, smallest)}, the smallest file of this model"


def _mix(tensors: Mapping[str, TensorInfo], chosen: Mapping[str, FormatSpec]) -> Mix:
    """A mix with the number of the named one whose bits are nearest, for programs that show a type."""
    sizes = [(chosen[name].nbytes(info.shape), np.prod(info.shape, dtype=np.float64))
             for name, info in tensors.items() if name in chosen]  # fmt: skip
    mean = 8 * sum(nbytes for nbytes, _ in sizes) / max(sum(weights for _, weights in sizes), 1)
    named = [mix for mix in MIXES.values() if mix.base in CANDIDATES]
    nearest = min(named, key=lambda mix: abs(mix.bits - mean))
    return Mix("fitted", nearest.file_type, BASE, bits(block_format(nearest.base)))
