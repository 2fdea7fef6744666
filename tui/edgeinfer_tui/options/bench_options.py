"""The options of `bench`, in the panels that `--help` shows."""

from enum import StrEnum
from typing import Annotated

from typer import Option

from edgeinfer_tui.options.options import MACHINE

WORKLOAD = "What is measured"
HOW = "How it is measured"
SHAPE = "A random file in place of MODEL"


class Output(StrEnum):
    """Output format of the results."""

    md = "md"
    json = "json"
    csv = "csv"


class Opponent(StrEnum):
    """Engine to compare with."""

    llama_cpp = "llama.cpp"


PromptTokens = Annotated[
    list[str],
    Option(
        "--prompt-tokens", metavar="N,...", help="Prompts of this number of tokens; 0: none.",
        rich_help_panel=WORKLOAD,
    ),
]  # fmt: skip
MaxTokens = Annotated[
    list[str],
    Option(
        "--max-tokens", "-n", metavar="N,...", help="Generate this number of tokens; 0: none.",
        rich_help_panel=WORKLOAD,
    ),
]  # fmt: skip
Depth = Annotated[
    list[str],
    Option(
        "--depth", "-d", metavar="N,...", help="Each of them behind so many tokens.", rich_help_panel=WORKLOAD
    ),
]
Threads = Annotated[
    list[str] | None,
    Option(
        "--threads", "-t", metavar="N,...", help="CPU threads. [dim]All usable cores if left out[/]",
        rich_help_panel=WORKLOAD, show_default=False,
    ),
]  # fmt: skip
InstructionSet = Annotated[
    str | None,
    Option(
        "--instruction-set",
        metavar="NAME",
        help="Kernels for this one, of those that `edgeinfer doctor` lists. [dim](the best)[/]",
        rich_help_panel=MACHINE,
    ),
]
Repetitions = Annotated[
    int, Option("--repetitions", "-r", min=1, help="Runs of each, without --vs.", rich_help_panel=HOW)
]
WarmUp = Annotated[
    bool, Option("--warm-up/--no-warm-up", help="One run that isn't counted.", rich_help_panel=HOW)
]
Seed = Annotated[int, Option("--seed", "-s", min=0, help="Of the prompts' tokens.", rich_help_panel=HOW)]
Versus = Annotated[
    Opponent | None,
    Option(
        "--vs",
        help="Interleave with llama.cpp on the same file: pip install 'edgeinfer\\[llama-cpp]'.",
        rich_help_panel=HOW,
    ),
]
Rounds = Annotated[int, Option("--rounds", min=10, help="Turns of each, with --vs.", rich_help_panel=HOW)]
ShapeName = Annotated[
    str | None,
    Option("--shape", metavar="NAME", help="As tinyllama-1.1b or llama-3-8b.", rich_help_panel=SHAPE),
]
TypeName = Annotated[
    str | None, Option("--type", metavar="TYPE", help="As Q4_K_M or Q8_0.", rich_help_panel=SHAPE)
]
OutputFormat = Annotated[
    Output, Option("--output", "-o", help="Markdown, JSON or CSV, to stdout.", rich_help_panel=HOW)
]
AsJson = Annotated[bool, Option("--json", help="Print JSON for a program to read.", rich_help_panel=HOW)]
