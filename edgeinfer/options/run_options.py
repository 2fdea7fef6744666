"""Options of one completion, besides the sampling parameters."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from edgeinfer.chat_templates.template_options import TemplateOptions, Thinking, Tool
from edgeinfer.options.option_field import (
    Progress,
    check_names,
    check_options,
    option,
    options_from,
    texts,
    whole,
)
from edgeinfer.options.sampling_params import GENERATION, SamplingKeywords, SamplingParams

ContextOverflow = Literal["stop", "shift", "h2o"]
Schema = Mapping[str, Any] | str | bool
"""A JSON schema as values or as text; keywords also take a pydantic model class."""
MAX_COMPLETIONS = 256
COUNTS = ("n", "best_of", "beams")
"""Options of `Model.generate` only."""
PROMPT_FORMAT = ("raw", "tools")
"""Options of prompts, which a chat doesn't take: it always applies the chat template, without tools."""
_option = partial(option, panel=GENERATION, commands="run chat")


@dataclass(frozen=True, kw_only=True, eq=False)
class RunOptions:
    """Options of one completion.

    - `n`: completions, returned as a list. They share the prompt's KV cache and are decoded as one batch;
      with a seed, completion i uses seed + i.
    - `best_of`: this many are sampled, and the `n` (or the one) with the highest mean log-probability per
      token are returned. `beams`: beam search instead of sampling; it doesn't support `stop`.
    - `max_tokens` None: until the model ends or the context is full. `stop`: strings that end the completion.
    - `context_overflow`: what happens when the context is full. "shift" and "h2o" evict tokens in the middle
      of the KV cache (`generation/context_shift.py`), which are counted in the result.
    - A JSON `schema` (or a pydantic model class) or a `grammar` (Lark, or llama.cpp's GBNF) constrains the
      completion.
    - `logprobs` n: every token has its log-probability and those of the n most probable.
    - `raw` False applies the chat template to a text; `tools`: functions for the template of messages.
    - `thinking` "on", "off", "low", "medium" or "high", if the template supports it. `template_args`: other
      variables of the template, by name.
    - `progress` is called with the number of prompt tokens processed.

    Raises:
        SettingError: a value out of range.
    """

    max_tokens: int | None = _option(
        None,
        "Maximum tokens to generate.",
        allowed=whole(0),
        default_note="no limit, also -1",
        common=True,
    )
    stop: tuple[str, ...] = _option(
        (), r"End the completion before this text; \n is a newline. May be repeated.", convert=texts,
        metavar="TEXT", persistent=False, server=True,
    )  # fmt: skip
    context_overflow: ContextOverflow = _option(
        "stop", "When the context is full. stop: end the completion; a chat drops its oldest messages. "
        "shift: context shift, which keeps the first tokens (with the system prompt) and the last ones in "
        "the KV cache. h2o: the same, and keep the tokens with the highest attention scores; on the CPU.",
        server=True,
    )  # fmt: skip
    n: int | None = _option(
        None, "Number of completions, decoded as one batch; with a seed, completion i uses seed + i.",
        allowed=whole(1, MAX_COMPLETIONS), flags=("--completions", "-n"), commands="run", default_note="1",
    )  # fmt: skip
    best_of: int | None = _option(
        None, "Sample this many completions and return the most probable.",
        allowed=whole(1, MAX_COMPLETIONS), commands="run",
    )  # fmt: skip
    beams: int | None = _option(
        None, "Beam search with this many beams, instead of sampling.",
        allowed=whole(1, MAX_COMPLETIONS), commands="run",
    )  # fmt: skip
    schema: Schema | None = _option(
        None, "Constrain the completion to JSON that matches this JSON schema.", flags=("--json-schema",),
        metavar="FILE", argument="file", convert=lambda name, given: _schema_of(given),
    )  # fmt: skip
    grammar: str | None = _option(
        None, "Constrain the completion to a grammar in Lark's syntax or llama.cpp's GBNF.", metavar="FILE",
        argument="file", server=True,
    )  # fmt: skip
    logprobs: int | None = _option(
        None, "Print the log-probability of each token and of the N most probable ones.", allowed=whole(0),
        metavar="N", panel="Reports, on stderr", commands="run", persistent=False,
    )  # fmt: skip
    raw: bool = _option(
        True, "Continue the prompt as a text, or apply the model's chat template.",
        flags=("--raw/--chat",), panel="Prompt", commands="run", persistent=False,
        default_note="chat if there is a template, except tiny", common=True,
    )  # fmt: skip
    tools: Sequence[Tool] = option(
        (), "Functions that the model may call.", convert=lambda name, given: given or ()
    )
    thinking: Thinking | None = option(None, "Reasoning before the response.")
    template_args: Mapping[str, Any] = option(
        None, "Variables of the chat template.", default_factory=dict,
        convert=lambda name, given: {} if given is None else given,
    )  # fmt: skip
    progress: Progress | None = option(None, "Called with prompt tokens processed.")

    def __post_init__(self) -> None:
        check_options(self)

    @property
    def is_constrained(self) -> bool:
        """Whether the completion follows a schema or a grammar."""
        return self.schema is not None or self.grammar is not None

    @property
    def template_options(self) -> TemplateOptions:
        """The options of the chat template. Raises `SettingError`."""
        return TemplateOptions(self.thinking, self.template_args, self.tools, self.is_constrained)


def _schema_of(given: Any) -> Any:
    """The JSON schema of a pydantic model class; other values unchanged."""
    to_schema = getattr(given, "model_json_schema", None)
    return to_schema() if isinstance(given, type) and callable(to_schema) else given


def run_options(
    given: Mapping[str, Any], without: tuple[str, ...] = COUNTS
) -> tuple[RunOptions, SamplingParams]:
    """The options of a completion from a caller's keywords; those in `without` are refused.

    Raises:
        SettingError: an unknown keyword, with the nearest known one, or an invalid value.
    """
    check_names(given, RunOptions, SamplingParams, without=without)
    return options_from(RunOptions, given), options_from(SamplingParams, given)


class ChatKeywords(SamplingKeywords, total=False):
    """Keywords of a response in a chat."""

    max_tokens: int | None
    stop: str | Iterable[str] | None
    context_overflow: ContextOverflow
    schema: Schema | type | None
    grammar: str | None
    logprobs: int | None
    thinking: Thinking | None
    template_args: Mapping[str, Any] | None
    progress: Progress | None


class RunKeywords(ChatKeywords, total=False):
    """Keywords of a completion: the fields of `SamplingParams` and of `RunOptions` without its counts."""

    raw: bool
    tools: Sequence[Tool] | None


class GenerateKeywords(RunKeywords, total=False):
    """Keywords of `Model.generate` besides `n`."""

    best_of: int | None
    beams: int | None
