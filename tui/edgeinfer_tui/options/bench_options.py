"""The options of `bench`, in the panels that `--help` shows."""

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated

from typer import BadParameter, Option

WORKLOAD = "Workload"
HOW = "Measurement"
SHAPE = "A random file instead of MODEL"


class Output(StrEnum):
    """Output format of the results."""

    md = "md"
    json = "json"
    csv = "csv"


class ComparedEngine(StrEnum):
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
        "--max-tokens", metavar="N,...", help="Generate this number of tokens; 0: none.",
        rich_help_panel=WORKLOAD,
    ),
]  # fmt: skip
Depth = Annotated[
    list[str],
    Option(
        "--depth",
        "-d",
        metavar="N,...",
        help="Tokens in the KV cache before each.",
        rich_help_panel=WORKLOAD,
    ),
]
Threads = Annotated[
    list[str] | None,
    Option(
        "--threads", "-t", metavar="N,...", help="CPU threads. [dim](all usable cores)[/]",
        rich_help_panel=WORKLOAD, show_default=False,
    ),
]  # fmt: skip
Repetitions = Annotated[
    int, Option("--repetitions", "-r", min=1, help="Runs of each, without --vs.", rich_help_panel=HOW)
]
WarmUp = Annotated[
    bool, Option("--warm-up/--no-warm-up", help="One run that isn't counted.", rich_help_panel=HOW)
]
Seed = Annotated[int, Option("--seed", "-s", min=0, help="Seed of the prompts' tokens.", rich_help_panel=HOW)]
Versus = Annotated[
    ComparedEngine | None,
    Option(
        "--vs",
        help="Interleave with llama.cpp on the same file: pip install 'edgeinfer\\[llama-cpp]'.",
        rich_help_panel=HOW,
    ),
]
Rounds = Annotated[int, Option("--rounds", min=10, help="Rounds of each, with --vs.", rich_help_panel=HOW)]
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


def numbers(option: str, given: Sequence[str], minimum: int) -> list[int]:
    """["512,32", "8"] -> [512, 32, 8].

    Raises `BadParameter` for a value that isn't an integer of at least `minimum`.
    """
    parsed = []
    for text in ",".join(given).split(","):
        word = text.strip()
        if not (word.isascii() and word.isdigit() and int(word) >= minimum):
            raise BadParameter(f"{option}: saw {word!r}, wanted whole numbers of at least {minimum}, as 1,2")
        parsed.append(int(word))
    return parsed
