"""Options of the command line alone: the source of the prompt, the chat to continue, and reports."""

from dataclasses import dataclass
from typing import Literal

from edgeinfer.options.load_options import MODEL, PROMPT, CacheTypes
from edgeinfer.options.option_field import option, whole
from edgeinfer_kernels.caches.cache_types import CacheType

DISPLAY = "Display"
REPORTS = "Reports, on stderr"


@dataclass(frozen=True, kw_only=True, eq=False)
class TerminalOptions:
    """Options that the commands handle themselves."""

    prompt_option: str | None = option(
        None, "The same as PROMPT.", flags=("--prompt", "-p"), metavar="TEXT", panel=PROMPT, commands="run",
        persistent=False,
    )  # fmt: skip
    prompt_file: str | None = option(
        None, "Read the prompt from a file.", flags=("--file", "-f"), metavar="FILE", argument="file",
        panel=PROMPT, commands="run",
    )  # fmt: skip
    batch: bool = option(
        False, "Each line of standard input is a prompt.", panel=PROMPT, commands="run", persistent=False
    )
    response_cache: int = option(
        0, "Keep the last N completions that are greedy or have a seed, and return one again for the same "
        "prompt and options; for --batch and serve.", allowed=whole(0), metavar="N", default_note="off",
        panel=REPORTS, commands="run serve",
    )  # fmt: skip
    system: str | None = option(None, "System prompt.", panel=PROMPT, commands="run chat", common=True)
    continue_: bool = option(
        False, "Continue the last chat, with its model.", flags=("--continue",), panel=PROMPT,
        commands="run chat", persistent=False, common=True,
    )  # fmt: skip
    session: str | None = option(
        None, "Continue the chat of this name or number, or create it. `edgeinfer history` lists them.",
        metavar="NAME", panel=PROMPT, commands="run chat", persistent=False,
    )  # fmt: skip
    private: bool = option(False, "Don't save this chat.", panel=PROMPT, commands="run chat")
    yes: bool = option(
        False, "Pull a model that isn't on this disk without asking.", flags=("--yes", "-y"), panel=MODEL,
        commands="run chat", persistent=False,
    )  # fmt: skip
    light: bool = option(
        False, "For a light terminal; F7 changes it. NO_COLOR is supported.", panel=DISPLAY, commands="chat",
        persistent=False, common=True,
    )  # fmt: skip
    web: bool = option(
        False, "Chat in the browser; without one, print the address of the page.", panel=DISPLAY,
        commands="chat", persistent=False, common=True,
    )  # fmt: skip
    mcp: bool = option(
        True, "Offer the tools of the settings file's MCP servers; each call is confirmed.", panel=PROMPT,
        commands="chat", persistent=False,
    )  # fmt: skip
    base_kv: CacheType | None = option(
        None, "KV cache type of the base model, if not that of --kv; without --base: of the same model.",
        allowed=CacheTypes(), metavar="TYPE[/TYPE][+f16]",
        panel=MODEL, commands="eval",
    )  # fmt: skip
    output: Literal["text", "json"] = option(
        "text", "text: streamed. json: one object per completion and line, with usage and timings.",
        flags=("--output", "-o"), panel=REPORTS, commands="run",
    )  # fmt: skip
    speed: bool = option(
        False,
        "Print the whole status line: speed of prompt and decoding, drafting, context use.",
        panel=REPORTS,
        commands="run",
        common=True,
    )
    verbose: bool = option(
        False, "Print the plan, options, loading time, and how drafting, sparsity and offload are set up.",
        flags=("--verbose", "-v"), panel=REPORTS,
        commands="run", common=True,
    )  # fmt: skip
