"""The options of a `run`, `chat` or `serve` command line, grouped by the function that takes them."""

import json
import math
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from typer import BadParameter

from edgeinfer.options import LoadOptions
from edgeinfer.options.run_options import COUNTS
from edgeinfer_tui.options.command_options import NOT_SET, CommandOption, command_options
from edgeinfer_tui.options.terminal_options import TerminalOptions
from edgeinfer_tui.prompt_source import unescaped
from edgeinfer_tui.text_files import text_of

EMPTY: tuple[object, ...] = ([], (), {})
"""Values of a repeatable option that wasn't given; releases of typer differ."""


@dataclass(frozen=True)
class ParsedOptions:
    """Parsed options of one command line."""

    model: str | None
    prompt: str | None
    loading: dict[str, Any] = field(default_factory=dict)
    """Keywords of `edgeinfer.load` that were given."""
    generation: dict[str, Any] = field(default_factory=dict)
    """Keywords of `Model.stream` that were given."""
    counts: dict[str, Any] = field(default_factory=dict)
    """Keywords of `Model.generate` for the number of completions: n, best_of, beams."""
    system: str | None = None
    raw: bool | None = None
    session: str | None = None
    """Name or number of the chat to continue or to create."""
    resume: bool = False
    private: bool = False
    yes: bool = False
    """A missing model is pulled without a question."""
    mcp: bool = True
    """The tools of the configured servers are offered."""
    batch: bool = False
    """Each line of standard input is a prompt."""
    response_cache: int = 0
    """Number of completions that are kept for repeated prompts."""
    json: bool = False
    """Completions are written to stdout as JSON."""
    speed: bool = False
    verbose: bool = False


def parsed_options(options: Mapping[str, Any], command: str) -> ParsedOptions:
    """Group the options of a command line; options that weren't given are omitted.

    Raises:
        BadParameter: a logit bias that isn't ID=BIAS, a file that isn't text, or options that exclude each
            other.
    """
    given = {name: value for name, value in options.items() if value is not None and value not in EMPTY}
    for name in ("max_tokens", "seed"):
        if given.get(name) == NOT_SET:
            del given[name]
    _check_conflicts(given)
    groups: dict[str, dict[str, Any]] = {"loading": {}, "generation": {}, "counts": {}}
    for name, option in command_options(command).items():
        if name in given and option.owner is not TerminalOptions and name != "raw":
            group = "loading" if option.owner is LoadOptions else "generation"
            groups["counts" if name in COUNTS else group][name] = _keyword(option, given[name])
    return ParsedOptions(
        model=given.get("model"),
        prompt=_prompt(given),
        **groups,
        system=given.get("system"),
        raw=given.get("raw"),
        session=given.get("session"),
        resume=given.get("continue_", False),
        private=given.get("private", False),
        yes=given.get("yes", False),
        mcp=given.get("mcp", True),
        batch=given.get("batch", False),
        response_cache=given.get("response_cache", 0),
        json=given.get("output") == "json",
        speed=given.get("speed", False),
        verbose=given.get("verbose", False),
    )


def _keyword(option: CommandOption, value: Any) -> Any:
    """The library's value of an option of the command line."""
    if option.info.argument == "file":
        return text_of(value, option.flags[0])
    if option.name == "draft":
        return None if value == "none" else value
    if option.hint == tuple[str, ...]:
        return tuple(map(unescaped, value))
    if typing.get_origin(option.hint) is Mapping:
        return template_args(value) if typing.get_args(option.hint)[0] is str else dict(map(_bias, value))
    return list(value) if option.value_type == list[Path] else value


def template_args(given: Sequence[str]) -> dict[str, Any]:
    """Variables of a chat template from NAME=VALUE. Raises `BadParameter` for other formats."""
    args: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise BadParameter(f"saw {text[:40]!r}, wanted NAME=VALUE", param_hint="--template-arg")
        try:
            args[name] = json.loads(value)
        except ValueError:
            args[name] = value
    return args


def _prompt(given: Mapping[str, Any]) -> str | None:
    """The prompt of the command line, given in one of three ways."""
    names = {"prompt": "PROMPT", "prompt_option": "--prompt", "prompt_file": "--file"}
    given_names = [name for name in names if name in given]
    if len(given_names) > 1:
        raise BadParameter(
            f"{' and '.join(names[name] for name in given_names)} both give the prompt; drop one"
        )
    if given_names == ["prompt_file"]:
        return text_of(given["prompt_file"], "--file").removesuffix("\n").removesuffix("\r")
    return given[given_names[0]] if given_names else None


def _check_conflicts(given: Mapping[str, Any]) -> None:
    """Raise `BadParameter` for options that exclude each other."""
    if given.get("raw") and "system" in given:
        raise BadParameter("--system needs the chat template, which --raw leaves out; drop one of them")
    named, resumed = "session" in given, given.get("continue_")
    if not (named or resumed):
        return
    if given.get("batch"):
        raise BadParameter("--session and --continue continue one chat, --batch has many; drop one")
    if named and resumed:
        raise BadParameter("--continue takes the last chat, --session the one named; drop one of them")
    if given.get("private") or given.get("raw"):
        other = "--private saves none" if given.get("private") else "--raw has no chat"
        raise BadParameter(f"--session and --continue continue a saved chat, {other}; drop one of them")


def _bias(text: str) -> tuple[int, float]:
    token_id, _, bias = text.partition("=")
    try:
        value = int(token_id), float(bias)
    except ValueError:
        value = -1, math.nan
    if value[0] < 0 or math.isnan(value[1]):
        raise BadParameter(
            f"--logit-bias: saw {text!r}, wanted ID=BIAS with a token id and a number, as 42=-1.5"
        )
    return value


def regeneration_options(options: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Options of regeneration number `count`: the seed is increased by one each time, as with `-n`."""
    seed = options.get("seed")
    return dict(options) if seed is None else {**options, "seed": seed + count}
