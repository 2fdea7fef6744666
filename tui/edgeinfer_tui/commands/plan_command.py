"""`edgeinfer plan`: memory placement and predicted speed of a model, without loading it."""

import json
from functools import partial
from typing import TYPE_CHECKING, Any

from typer import BadParameter

from edgeinfer_tui import interrupts
from edgeinfer_tui.failures import say
from edgeinfer_tui.options import arguments
from edgeinfer_tui.options import plan_options as own
from edgeinfer_tui.options.command_options import command
from edgeinfer_tui.options.settings import filled
from edgeinfer_tui.output.labelled_progress import LabelledProgress
from edgeinfer_tui.output.progress_line import BUILDING

if TYPE_CHECKING:
    from collections.abc import Callable

    from edgeinfer.planning.model_plan import ModelPlan


@command("plan")
def plan(
    model: arguments.ModelArgument = None,
    device: own.Device = None,
    layers: own.Layers = False,
    verbose: own.Verbose = False,
    curve: own.Curve = False,
    measure: own.Measure = False,
    shape: own.ShapeName = None,
    type_: own.TypeName = None,
    as_json: arguments.AsJson = False,
    **given: Any,
) -> None:
    """Show whether a model fits, where every byte would go, what limits it, and the predicted speed.

    Loads nothing. FLOP/B: operations for each byte that a token reads.

    [bold]Examples[/]

      edgeinfer plan tiny

      edgeinfer plan llama-8b.gguf --context 8192 --vram 6GiB --verbose

      edgeinfer plan qwen3-8b --device "rtx 4060 laptop" --device "rtx 3090"

      edgeinfer plan --shape llama-3.3-70b --type Q4_K_M --device "rtx 4090, 64GiB ram"

      edgeinfer plan qwen3-30b.gguf --device "rtx 4060 laptop, 32GiB ram, 80GB/s ram" --curve
    """
    from edgeinfer.errors import Detail
    from edgeinfer.user_folders import user_folder
    from edgeinfer_offload.machine.measure import stored_draft_figures, stored_figures

    settings = _settings({"model": model, "device": device[0] if device else None, **given})
    plan_on = _planner(settings.pop("model", None) if shape is None else model, shape, type_)
    settings.pop("model", None)
    if measure:
        for figures in (stored_figures, stored_draft_figures):
            figures(user_folder("cache")).forget()
    interrupts.raise_exception()
    if device and len(device) > 1:
        if curve:
            raise BadParameter("--curve is for one machine; drop it, or all but one --device")
        _compare(device, lambda machine: plan_on(**{**settings, "device": machine}), as_json)
        return
    with LabelledProgress(time_left=True) as progress:
        result = plan_on(**settings, build_progress=progress.step(BUILDING))
    for warning in result.warnings:
        if verbose or not isinstance(warning, Detail):
            say(warning)
    if as_json:
        _print_json({**result.to_dict(), **({"curve": result.curve().to_dict()} if curve else {})})
    elif curve:
        _print_curve(result)
    else:
        print(result.plan.explain(layers, verbose))


def _settings(given: dict[str, Any]) -> dict[str, Any]:
    """The options of the library: those that are given on the command line or in the settings."""
    settings = {name: value for name, value in filled(given).items() if value is not None}
    if settings.get("draft") == "none":
        settings["draft"] = None
    return settings


def _planner(model: str | None, shape: str | None, kind: str | None) -> "Callable[..., ModelPlan]":
    """The function that plans what the user named. Raises `BadParameter` for a model and a shape."""
    from edgeinfer.planning.model_plan import plan_model, plan_shape

    if shape is None and kind is not None:
        raise BadParameter("--type: only with --shape; a model's type is in its name, as qwen3-8b:Q6_K")
    if shape is not None and model is not None:
        raise BadParameter(f"saw the model {model!r} and --shape {shape}; drop one of them")
    return partial(plan_model, model) if shape is None else partial(plan_shape, shape, kind or "")


def _compare(devices: list[str], plan_on: "Callable[[str], ModelPlan]", as_json: bool) -> None:
    """Print a row for each described machine."""
    from edgeinfer.planning.model_plan import plan_on_machines
    from edgeinfer_offload.report.plan_comparison import comparison_fields, comparison_text

    plans = plan_on_machines(devices, plan_on)
    if as_json:
        _print_json({"machines": comparison_fields(plans)})
    else:
        print(comparison_text(plans))


def _print_curve(result: "ModelPlan") -> None:
    from edgeinfer_offload.report.plan_curve import curve_text
    from edgeinfer_offload.report.plan_verdict import plan_verdict

    print(f"{plan_verdict(result.plan)}\n\n{curve_text(result.curve())}")


def _print_json(fields: dict[str, Any]) -> None:
    print(json.dumps(fields, indent=2, allow_nan=False))
