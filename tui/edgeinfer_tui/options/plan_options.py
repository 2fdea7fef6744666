"""The options of `plan`, in the panels that `--help` shows."""

from typing import Annotated

from typer import Option

from edgeinfer.options.load_options import MODEL

REPORT = "Report"
SHAPE = "A known shape instead of MODEL"

Device = Annotated[
    list[str] | None,
    Option(
        "--device",
        help="auto, cpu, cuda, cuda:N or cuda:0,cuda:1; or another machine: "
        '"rtx 4060 laptop, 64GB/s ram, 32GiB ram", "2x rtx 3090", "my card: 8GiB, 256GB/s, pcie 12GB/s". '
        "Several described machines: one row each. [dim](auto)[/]",
        rich_help_panel=MODEL,
        show_default=False,
    ),
]
Layers = Annotated[
    bool, Option("--layers", help="Print every layer.", show_default=False, rich_help_panel=REPORT)
]
Verbose = Annotated[
    bool,
    Option(
        "--verbose",
        "-v",
        help="Print budgets, prompt speed and what limits the plan.",
        show_default=False,
        rich_help_panel=REPORT,
    ),
]
Curve = Annotated[
    bool,
    Option(
        "--curve",
        help="Print the speed over batch size and context length.",
        show_default=False,
        rich_help_panel=REPORT,
    ),
]
Measure = Annotated[bool, Option("--measure", help="Measure this machine again.", show_default=False)]
ShapeName = Annotated[
    str | None,
    Option(
        "--shape",
        metavar="NAME",
        help="As qwen3-8b or llama-3-8b; needs no file and no network.",
        rich_help_panel=SHAPE,
    ),
]
TypeName = Annotated[
    str | None,
    Option("--type", metavar="TYPE", help="As Q4_K_M or Q8_0. [dim](Q4_K_M)[/]", rich_help_panel=SHAPE),
]
