"""Quantize a model file: `edgeinfer.quantize` stores its weights in a mix of smaller formats."""

import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edgeinfer.calibration.checkpoint import Checkpoint
from edgeinfer.calibration.fitting import Fitted, fit_types
from edgeinfer.calibration.goals import Goal, goal_of
from edgeinfer.calibration.hessian_quantizing import calibrated
from edgeinfer.calibration.reference_model import opened
from edgeinfer.errors import SettingError
from edgeinfer.hot_first import HotFirst, hot_first_orders, save_reordered
from edgeinfer.hugging_face.folder_file import FolderFile
from edgeinfer.registry.registry import find_model
from edgeinfer_kernels.system.processor import usable_cpus
from edgeinfer_quant_formats import FormatError, FormatSpec, GGUFFile
from edgeinfer_quant_formats.quantizer.importance_file import Importance, read_importance
from edgeinfer_quant_formats.quantizer.mixes import find_mix
from edgeinfer_quant_formats.quantizer.neuron_order import ReorderedFile, reordered_plan
from edgeinfer_quant_formats.quantizer.quantizing import (
    IMPORTANCE_KEYS,
    QuantizationPlan,
    missing_importance,
    plan_as_it_is,
    plan_quantization,
    write_quantized,
)
from edgeinfer_quant_formats.quantizer.type_selection import Override, TypeOptions, unmatched, weight_format

DEFAULT_TYPE = "Q4_K_M"
WANTS_IMPORTANCE = ("Q2_K_S",)
NOT_ROUNDED = ("IQ4_XS", "IQ4_NL")
"""Formats that a fitted file can have, but whose codes aren't rounded by the Hessian."""

Progress = Callable[[int, int], None]
Report = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Quantization:
    """The result: the plan, warnings (one line each), and the seconds that writing took."""

    source: Path
    source_bytes: int
    target: Path | None
    plan: QuantizationPlan
    warnings: tuple[str, ...]
    seconds: float = 0.0


def quantize(
    model: str | Path,
    target: str | Path | None,
    type: str | None = None,
    *,
    hot_first: bool = False,
    importance: str | Path | None = None,
    fit: int | str | None = None,
    bits_per_weight: float | None = None,
    tokens_per_second: float | None = None,
    text: str | None = None,
    calibrate: str | None = None,
    overrides: Mapping[str, str] | None = None,
    pure: bool = False,
    output_type: str | None = None,
    embedding_type: str | None = None,
    threads: int | None = None,
    allow_requantize: bool = False,
    overwrite: bool = False,
    dry_run: bool = False,
    progress: Progress | None = None,
    report: Report | None = None,
) -> Quantization:
    """Write the weights of `model`, a name or a path, to the GGUF file `target` in the mix `type`.

    `type` None: Q4_K_M; with `hot_first`, and of a Hugging Face folder, the formats that the model has.
    `hot_first`: neurons in the order of the model's profile, which computes the same function; the profile is
    saved for `target` too. `importance`: an importance matrix. `overrides`: regular expression -> format for
    tensors whose names it matches, the first match applies. `pure`: one format for all. `threads` None: all
    usable processors. `dry_run`: only return the plan; `target` may be None then. `progress` is called with
    bytes read.

    Matrices in IQ1_S to IQ3_XXS need `importance`, except the token embedding and the output matrix.

    `fit` (bytes, or as "6GiB"), `bits_per_weight` or `tokens_per_second` instead of `type`: the format of
    each tensor is selected so that the file reaches this with the least divergence. How much each tensor's
    format changes the outputs is measured on `text` (by default, on text that the model generates), which
    takes minutes to hours and is kept; `report` is called with the task, and its done and total amounts.

    `calibrate`: a text; matrices in Q4_0 to Q5_1 and Q2_K to Q6_K are rounded by the Hessians of their inputs
    on it (GPTQ). An interrupted run leaves `target`.partial, with which the same call resumes.

    The file is written completely or not at all. Raises `EdgeInferError` or `FormatError`, in one line, for
    errors that a user can fix, `OSError` if the disk is full.
    """
    threads = _checked_threads(threads)
    options = _type_options(pure, output_type, embedding_type, overrides or {})
    if calibrate is not None and hot_first:
        raise SettingError("calibrate: not together with hot_first; quantize first, then reorder the file")
    goal = _checked_goal(goal_of(fit, bits_per_weight, tokens_per_second), type, options)
    given = None if importance is None else read_importance(importance)
    source = find_model(model).path
    if hot_first and source.is_dir():
        raise SettingError(f"hot_first: {source} is a folder; convert it, then reorder the file")
    with opened(source) as file:
        hot = hot_first_orders(file) if hot_first else HotFirst()
        fitted = None
        if goal is not None:
            excluded = () if calibrate is None else NOT_ROUNDED
            fitted = fit_types(source, file, goal, text or calibrate, given, excluded, report)
        done = _planned(file, None if target is None else Path(target), type, options, given, hot, fitted)
        done = replace(done, source=source)
        _check_requantizing(done.plan, allow_requantize)
        if dry_run:
            return done
        if missing := missing_importance(done.plan):
            raise SettingError(f"{missing} (imatrix=); `edgeinfer profile MODEL --imatrix TEXT` makes one")
        path = _checked_target(done.target, file, done.plan, overwrite)
        metadata = _importance_metadata(importance, given)
        if calibrate is None:
            return replace(done, seconds=_write(file, done.plan, hot, path, metadata, threads, progress))
        start = time.perf_counter()

        def rounded() -> Checkpoint:
            ready = calibrated(file, done.plan, path, calibrate, report)
            _write(ready.file, ready.plan, hot, path, metadata, threads, progress)
            return ready.saved

        rounded().remove()  # its arrays are not mapped any more: Windows deletes no mapped file
        return replace(done, seconds=time.perf_counter() - start)


def convert(
    folder: str | Path, target: str | Path | None, type: str | None = None, **options: Any
) -> Quantization:
    """Write the model of a Hugging Face folder to the GGUF file `target`; `type` None: in the formats that it
    has. `options` and `Raises`: as for `quantize`.
    """
    source = find_model(folder).path
    if not source.is_dir():
        raise SettingError(f"{source}: is a GGUF file already; to change its type, quantize it")
    return quantize(folder, target, type, **options)


def _checked_goal(goal: Goal | None, type: str | None, options: TypeOptions) -> Goal | None:
    """The goal, if no option names formats too."""
    if goal is not None and (type is not None or options != TypeOptions()):
        raise SettingError(f"goal: saw {goal} and types by name; drop one of them, a goal selects all types")
    return goal


def _checked_threads(threads: int | None) -> int:
    if threads is not None and threads < 1:
        raise SettingError(f"threads: saw {threads}, wanted a whole number of at least 1, or None")
    return threads or usable_cpus()


def _planned(
    file: GGUFFile,
    target: Path | None,
    type: str | None,
    options: TypeOptions,
    importance: Importance | None,
    hot: HotFirst,
    fitted: Fitted | None = None,
) -> Quantization:
    is_kept = type is None and (bool(hot.orders) or isinstance(file, FolderFile))
    mix = None if is_kept else find_mix(type or DEFAULT_TYPE)
    if fitted is not None:
        mix, options = fitted.mix, replace(options, overrides=fitted.overrides)
    plan = plan_quantization(file, mix, options, importance) if mix else plan_as_it_is(file)
    idle = unmatched(options.overrides, file.tensors, plan.model.architecture)
    if idle:
        raise SettingError(f"pattern {idle[0]!r}: matches none of the tensors that are quantized")
    warnings = [hot.note] if hot.note else []
    if mix is not None and not hot.orders and all(tensor.is_copied for tensor in plan.tensors):
        warnings.append(
            f"every tensor has its type in {plan.mix.name} already: the copy has the same weights"
        )
    return Quantization(file.path, file.nbytes, target, plan, (*warnings, *_warnings(plan, importance)))


def _type_options(
    pure: bool, output: str | None, embedding: str | None, overrides: Mapping[str, str]
) -> TypeOptions:
    return TypeOptions(
        pure=pure,
        output=_weight_format("output_type", output) if output else None,
        embedding=_weight_format("embedding_type", embedding) if embedding else None,
        overrides=tuple(_override(pattern, name) for pattern, name in overrides.items()),
    )


def _override(pattern: str, name: str) -> Override:
    try:
        compiled = re.compile(pattern, re.IGNORECASE)
    except re.error as error:
        raise SettingError(f"pattern {pattern!r}: {error}, wanted a regular expression") from None
    return Override(compiled, _weight_format(f"pattern {pattern!r}", name))


def _weight_format(setting: str, name: str) -> FormatSpec:
    try:
        return weight_format(name)
    except FormatError as error:
        raise SettingError(f"{setting}: {error}") from None


def _check_requantizing(plan: QuantizationPlan, allowed: bool) -> None:
    again = [tensor.info for tensor in plan.tensors if tensor.is_requantized]
    if again and not allowed:
        raise SettingError(
            f"{len(again)} of {len(plan.tensors)} tensors are quantized already "
            f"({again[0].name} is {again[0].format.name}) and would lose more than from F16 or F32; "
            "take such a file, or allow it (allow_requantize=True)"
        )


def _checked_target(target: Path | None, file: GGUFFile, plan: QuantizationPlan, overwrite: bool) -> Path:
    if target is None:
        raise SettingError("target: saw None, wanted the path of the file to write")
    if target.is_dir() or not target.absolute().parent.is_dir():
        last_error = "is a folder" if target.is_dir() else "there is no such folder"
        raise SettingError(f"{target}: {last_error}, wanted the path of a file to write")
    if target.exists():
        if any(target.samefile(part) for part in file.parts):
            raise SettingError(f"{target}: is the model to read, wanted another file to write")
        if not overwrite:
            raise SettingError(f"{target}: is there already; replace it with overwrite=True")
    free = shutil.disk_usage(target.absolute().parent).free
    if free < plan.nbytes:
        raise SettingError(
            f"{target}: takes {plan.nbytes} bytes, wanted at most {free}, which are free there"
        )
    return target


def _importance_metadata(path: str | Path | None, importance: Importance | None) -> dict[str, str | int]:
    """Metadata that llama.cpp's quantizer writes for an importance matrix."""
    if importance is None:
        return {}
    values: dict[str, str | int] = {
        "file": str(path),
        "dataset": importance.dataset,
        "entries": len(importance.tensors),
        "chunks": importance.chunks,
    }
    return {IMPORTANCE_KEYS[name]: value for name, value in values.items() if value}


def _warnings(plan: QuantizationPlan, importance: Importance | None) -> list[str]:
    warnings = []
    stand_ins = Counter(
        (tensor.requested.name, tensor.target.name)
        for tensor in plan.tensors
        if tensor.target != tensor.requested
    )
    for (requested, stored), count in stand_ins.items():
        warnings.append(f"rows of {_tensors(count)} don't fill {requested} blocks: stored as {stored}")
    if plan.without_importance:
        count, first = len(plan.without_importance), plan.without_importance[0]
        warnings.append(
            f"the importance matrix doesn't name {_tensors(count)} ({first}): quantized without it"
        )
    if missing := missing_importance(plan):
        warnings.append(f"{missing} (imatrix=)")
    if importance is None and plan.mix.name in WANTS_IMPORTANCE:
        warnings.append(f"{plan.mix.name} is made for an importance matrix (imatrix=); expect a poor model")
    again = sum(tensor.is_requantized for tensor in plan.tensors)
    if again:
        warnings.append(f"{_tensors(again)} quantized already: the new error comes on top of the old one")
    return warnings


def _tensors(count: int) -> str:
    return "1 tensor" if count == 1 else f"{count} tensors"


def _write(
    file: GGUFFile,
    plan: QuantizationPlan,
    hot: HotFirst,
    target: Path,
    metadata: Mapping[str, str | int],
    threads: int,
    progress: Progress | None,
) -> float:
    """Write the file, and its profile if its neurons are reordered; return the seconds that it took."""
    start = time.perf_counter()
    ordered = ReorderedFile(file, hot.orders) if hot.orders else file
    plan = reordered_plan(plan, hot.orders)
    try:
        write_quantized(ordered, plan, target, metadata, threads, progress)
    except OSError as error:
        if error.strerror and error.filename is None:
            raise OSError(error.errno, error.strerror, str(target)) from error
        raise
    if hot.profile:
        save_reordered(hot.profile, hot.orders, target)
    return time.perf_counter() - start
