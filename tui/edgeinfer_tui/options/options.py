"""The options of `run`, `chat` and `serve`, each with its help, in the panels that `--help` shows.

`option_sets.py` defines which command takes which option. A test checks the defaults in the help texts
against the library.
"""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from edgeinfer_tui.options.completion import models_here


class OnFull(StrEnum):
    """Policy when a text exceeds the context."""

    stop = "stop"
    slide = "slide"
    heavy_hitters = "heavy-hitters"


class EngineName(StrEnum):
    """The inference engine."""

    edgeinfer = "edgeinfer"
    llama_cpp = "llama.cpp"


class Thinking(StrEnum):
    """Amount of reasoning before the response."""

    on = "on"
    off = "off"
    low = "low"
    medium = "medium"
    high = "high"


class CacheType(StrEnum):
    """Data type of the KV cache."""

    f32 = "f32"
    f16 = "f16"
    q8_0 = "q8_0"
    q4_0 = "q4_0"


class AnswerOutput(StrEnum):
    """Output format on stdout."""

    text = "text"
    json = "json"


class Sparse(StrEnum):
    """Whether the CPU reads only active neurons."""

    auto = "auto"
    exact = "exact"
    predicted = "predicted"
    off = "off"


ANSWER = "The answer"
PROMPT = "The prompt"
LOOKS = "How it looks"
MACHINE = "The model and the machine"
REPORT = "What is reported, on stderr"

ModelArgument = Annotated[
    str | None,
    Argument(
        help="A name from `edgeinfer list`, or a .gguf file. [dim]tiny if left out[/]",
        show_default=False,
        autocompletion=models_here,
    ),
]
PromptArgument = Annotated[
    str | None,
    Argument(help="What to say. [dim]Piped input if left out; a chat on a terminal[/]", show_default=False),
]

MaxTokens = Annotated[
    int | None,
    Option("--max-tokens", "-n", help="Stop after N tokens; -1: no limit.", rich_help_panel=ANSWER),
]
Stop = Annotated[
    list[str] | None,
    Option(
        "--stop", help=r"Stop before this text; \n is a newline. May be repeated.", rich_help_panel=ANSWER
    ),
]
WhenFull = Annotated[
    OnFull | None,
    Option(
        "--on-full",
        help="When the context is full. stop: the answer ends; a chat drops its oldest turns. slide: go on "
        "without tokens of the middle, keeping the first (with the system prompt) and the last. "
        "heavy-hitters: the same, keeping of the middle what the last tokens look at most; on the CPU. "
        "[dim](stop)[/]",
        rich_help_panel=ANSWER,
    ),
]
Seed = Annotated[
    int | None,
    Option(
        "--seed",
        "-s",
        help="Repeat the same samples. [dim]A random one if left out, or -1[/]",
        rich_help_panel=ANSWER,
    ),
]

Answers = Annotated[
    int | None,
    Option(
        "--answers",
        help="Give so many, drawn side by side; with a seed, the next one up for each. [dim](1)[/]",
        rich_help_panel=ANSWER,
    ),
]
BestOf = Annotated[
    int | None,
    Option(
        "--best-of",
        help="Draw so many, give the one that the model finds most probable.",
        rich_help_panel=ANSWER,
    ),
]
Beams = Annotated[
    int | None,
    Option(
        "--beams",
        help="Search for the most probable answer by so many beams; nothing is drawn.",
        rich_help_panel=ANSWER,
    ),
]
JsonSchema = Annotated[
    Path | None,
    Option(
        "--json-schema",
        metavar="FILE",
        help="Answer with JSON that this JSON schema allows.",
        exists=True,
        dir_okay=False,
        rich_help_panel=ANSWER,
    ),
]
GrammarFile = Annotated[
    Path | None,
    Option(
        "--grammar",
        metavar="FILE",
        help="Answer as this grammar allows, in Lark's syntax or llama.cpp's GBNF.",
        exists=True,
        dir_okay=False,
        rich_help_panel=ANSWER,
    ),
]

PromptOption = Annotated[
    str | None,
    Option("--prompt", "-p", metavar="TEXT", help="The same as PROMPT.", rich_help_panel=PROMPT),
]
PromptFile = Annotated[
    Path | None,
    Option(
        "--file",
        "-f",
        metavar="FILE",
        help="Read the prompt from a file.",
        exists=True,
        dir_okay=False,
        rich_help_panel=PROMPT,
    ),
]
Lines = Annotated[
    bool,
    Option(
        "--lines",
        help="Each line of standard input is a prompt of its own.",
        rich_help_panel=PROMPT,
        show_default=False,
    ),
]
System = Annotated[
    str | None, Option("--system", help="What the model is told first.", rich_help_panel=PROMPT)
]
Raw = Annotated[
    bool | None,
    Option(
        "--raw/--chat",
        help="Continue the prompt as it stands, or put it into the model's chat template. "
        "[dim]Chat where there is a template, but tiny continues[/]",
        rich_help_panel=PROMPT,
        show_default=False,
    ),
]
ChatTemplate = Annotated[
    Path | None,
    Option(
        "--chat-template",
        help="A Jinja file in place of the model's own template.",
        exists=True,
        dir_okay=False,
        rich_help_panel=PROMPT,
    ),
]
ThinkingLevel = Annotated[
    Thinking | None,
    Option(
        "--thinking",
        help="Reasoning before the answer, as far as the model's chat template has a setting for it "
        "(enable_thinking, reasoning_effort). [dim]The template's default[/]",
        rich_help_panel=PROMPT,
    ),
]
TemplateArg = Annotated[
    list[str] | None,
    Option(
        "--template-arg",
        metavar="NAME=VALUE",
        help="A variable of the chat template; VALUE is JSON, or else text. May be repeated.",
        rich_help_panel=PROMPT,
    ),
]
PreTokenizer = Annotated[
    str | None,
    Option(
        "--assume-pre-tokenizer",
        metavar="NAME",
        help="Split text as this one does, where the file names one that isn't known.",
        rich_help_panel=PROMPT,
    ),
]

Light = Annotated[
    bool,
    Option(
        "--light",
        help="For a light terminal; F7 changes it. NO_COLOR is heeded.",
        rich_help_panel=LOOKS,
        show_default=False,
    ),
]

Context = Annotated[
    int | None,
    Option("--context", "-c", help="Tokens that prompt and answer may take.", rich_help_panel=MACHINE),
]
Engine = Annotated[
    EngineName | None,
    Option(
        "--engine",
        help="llama.cpp runs what edgeinfer can't: pip install 'edgeinfer\\[llama-cpp]'. [dim](edgeinfer)[/]",
        rich_help_panel=MACHINE,
    ),
]
Device = Annotated[
    str | None, Option("--device", help="auto, cpu, cuda or cuda:N. [dim](auto)[/]", rich_help_panel=MACHINE)
]
Vram = Annotated[
    str | None,
    Option("--vram", metavar="SIZE", help="GPU memory to use at most, as 8GiB.", rich_help_panel=MACHINE),
]
Ram = Annotated[
    str | None,
    Option("--ram", metavar="SIZE", help="Main memory to use at most, as 12GiB.", rich_help_panel=MACHINE),
]
Threads = Annotated[
    int | None,
    Option("--threads", "-t", help="CPU threads. [dim]Chosen if left out[/]", rich_help_panel=MACHINE),
]
Repack = Annotated[
    bool | None,
    Option(
        "--repack/--no-repack",
        help="Move the weights into the kernels' layout, or leave them in the file's memory map: next to no "
        "memory of our own, answers at about a third of the speed. [dim](repack)[/]",
        rich_help_panel=MACHINE,
        show_default=False,
    ),
]
SparseFeedForward = Annotated[
    Sparse | None,
    Option(
        "--sparse",
        help="For models with a ReLU: read, of what the CPU has, the weights of active neurons only; "
        "predicted: guess which they are. [dim](auto: exact on a CPU alone where the profile says that it "
        "pays)[/]",
        rich_help_panel=MACHINE,
    ),
]
Draft = Annotated[
    str | None,
    Option(
        "--draft",
        metavar="auto|lookup|self|none|MODEL",
        help="What guesses tokens ahead: a small model of the same vocabulary, or what followed the same "
        "words before, or half of the model's own layers. It changes the speed, never what may be said. "
        "[dim](auto)[/]",
        rich_help_panel=MACHINE,
    ),
]
DraftLeaves = Annotated[
    int | None,
    Option(
        "--draft-leaves",
        help="Tokens that a draft model offers beside those of its draft, on the CPU. [dim](0)[/]",
        rich_help_panel=MACHINE,
    ),
]
Reference = Annotated[
    list[Path] | None,
    Option(
        "--reference",
        metavar="FILE",
        help="A text that the answer is likely to repeat, as code that is to be edited: guesses come from "
        "there first. May be repeated.",
        exists=True,
        dir_okay=False,
        rich_help_panel=MACHINE,
    ),
]
Kv = Annotated[
    CacheType | None,
    Option(
        "--kv",
        help="How the cache is stored; q8_0 takes half the bytes, q4_0 a quarter. [dim](f16)[/]",
        rich_help_panel=MACHINE,
    ),
]

Output = Annotated[
    AnswerOutput | None,
    Option(
        "--output",
        "-o",
        help="text: as it comes. json: an object a line when an answer is there, with usage and timings. "
        "[dim](text)[/]",
        rich_help_panel=REPORT,
    ),
]
Speed = Annotated[
    bool,
    Option(
        "--speed", help="The status line, on a terminal or not.", rich_help_panel=REPORT, show_default=False
    ),
]
Logprobs = Annotated[
    int | None,
    Option(
        "--logprobs",
        metavar="N",
        help="The log-probability of each token and of the N best.",
        rich_help_panel=REPORT,
    ),
]
Verbose = Annotated[
    bool,
    Option(
        "--verbose", "-v", help="Plan, settings, loading time.", rich_help_panel=REPORT, show_default=False
    ),
]
