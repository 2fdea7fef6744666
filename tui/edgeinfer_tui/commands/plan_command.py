"""`edgeinfer plan`: memory placement and predicted speed of a model, without loading it."""

import json
from typing import TYPE_CHECKING, Any

from edgeinfer_tui import interrupts
from edgeinfer_tui.failures import say
from edgeinfer_tui.options import arguments
from edgeinfer_tui.options import plan_options as own
from edgeinfer_tui.options.command_options import command
from edgeinfer_tui.options.settings import filled
from edgeinfer_tui.output.labelled_progress import LabelledProgress
from edgeinfer_tui.output.progress_line import BUILDING

if TYPE_CHECKING:
    from edgeinfer.planning.model_plan import ModelPlan


@command("plan")
def plan(
    model: arguments.ModelArgument = None,
    device: own.Device = None,
    layers: own.Layers = False,
    verbose: own.Verbose = False,
    curve: own.Curve = False,
    measure: own.Measure = False,
    as_json: arguments.AsJson = False,
    **given: Any,
) -> None:
    """Show whether a model fits, where every byte would go, what limits it, and the predicted speed.

    Loads nothing. FLOP/B: operations for each byte that a token reads.

    [bold]Examples[/]

      edgeinfer plan tiny

      edgeinfer plan llama-8b.gguf --context 8192 --vram 6GiB --verbose

      edgeinfer plan qwen3-8b --device "rtx 4060 laptop" --device "rtx 3090"

      edgeinfer plan qwen3-30b.gguf --device "rtx 4060 laptop, 32GiB ram, 80GB/s ram" --curve
    """
    from edgeinfer.planning.model_plan import plan_model
    from edgeinfer.user_folders import user_folder
    from edgeinfer_offload.machine.measure import stored_figures

    several = device if device and len(device) > 1 else None
    options = filled({"model": model, "device": device[0] if device else None, **given})
    settings = {name: value for name, value in options.items() if value is not None}
    name = settings.pop("model", None)
    if settings.get("draft") == "none":
        settings["draft"] = None
    if measure:
        stored_figures(user_folder("cache")).forget()
    interrupts.raise_exception()
    if several:
        _compare(name, several, {key: value for key, value in settings.items() if key != "device"}, as_json)
        return
    with LabelledProgress(time_left=True) as progress:
        result = plan_model(name, **settings, build_progress=progress.step(BUILDING))
    for warning in result.warnings:
        say(warning)
    if as_json:
        _print_json({**result.to_dict(), **({"curve": result.curve().to_dict()} if curve else {})})
    elif curve:
        _print_curve(result)
    else:
        print(result.plan.explain(layers, verbose))


def _compare(model: str | None, devices: list[str], settings: dict[str, Any], as_json: bool) -> None:
    """Print a row for each described machine."""
    from edgeinfer.planning.model_plan import plan_on_machines
    from edgeinfer_offload.report.plan_comparison import comparison_fields, comparison_text

    name, plans = plan_on_machines(model, devices, **settings)
    if as_json:
        _print_json({"model": name, "machines": comparison_fields(plans)})
    else:
        print(f"{name}\n\n{comparison_text(plans)}")


def _print_curve(result: "ModelPlan") -> None:
    from edgeinfer_offload.report.plan_curve import curve_text
    from edgeinfer_offload.report.plan_verdict import plan_verdict

    print(f"{plan_verdict(result.plan)}\n\n{curve_text(result.curve())}")


def _print_json(fields: dict[str, Any]) -> None:
    print(json.dumps(fields, indent=2, allow_nan=False))
