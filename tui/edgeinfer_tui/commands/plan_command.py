"""`edgeinfer plan`: memory placement and predicted speed of a model, without loading it."""

import json
from typing import Annotated, Any

from typer import Option

from edgeinfer.options.load_options import MODEL
from edgeinfer_tui import interrupts
from edgeinfer_tui.failures import say
from edgeinfer_tui.options import arguments
from edgeinfer_tui.options.command_options import command
from edgeinfer_tui.options.settings import filled
from edgeinfer_tui.output.labelled_progress import LabelledProgress
from edgeinfer_tui.output.progress_line import BUILDING

Device = Annotated[
    str | None,
    Option(
        "--device",
        help="auto, cpu, cuda or cuda:N; or another machine: "
        '"rtx 4060 laptop, 64GB/s ram, 32GiB ram", "my card: 8GiB, 256GB/s, pcie 12GB/s". [dim](auto)[/]',
        rich_help_panel=MODEL,
    ),
]
Layers = Annotated[bool, Option("--layers", help="Print every layer.", show_default=False)]
Measure = Annotated[bool, Option("--measure", help="Measure this machine again.", show_default=False)]


@command("plan")
def plan(
    model: arguments.ModelArgument = None,
    device: Device = None,
    layers: Layers = False,
    measure: Measure = False,
    as_json: arguments.AsJson = False,
    **given: Any,
) -> None:
    """Show where every byte of a model would go, what limits it, and the predicted speed. Loads nothing.

    [bold]Examples[/]

      edgeinfer plan tiny

      edgeinfer plan llama-8b.gguf --context 8192 --vram 6GiB

      edgeinfer plan qwen3-30b.gguf --device "rtx 4060 laptop, 32GiB ram, 80GB/s ram"
    """
    from edgeinfer.planning.model_plan import plan_model
    from edgeinfer.user_folders import user_folder
    from edgeinfer_offload.machine.measure import stored_figures

    options = filled({"model": model, "device": device, **given})
    settings = {name: value for name, value in options.items() if value is not None}
    name = settings.pop("model", None)
    if settings.get("draft") == "none":
        settings["draft"] = None
    if measure:
        stored_figures(user_folder("cache")).forget()
    interrupts.raise_exception()
    with LabelledProgress(time_left=True) as progress:
        result = plan_model(name, **settings, build_progress=progress.step(BUILDING))
    for warning in result.warnings:
        say(warning)
    if as_json:
        print(json.dumps({"model": result.model, **result.plan.to_dict()}, indent=2, allow_nan=False))
    else:
        print(result.plan.explain(layers))
