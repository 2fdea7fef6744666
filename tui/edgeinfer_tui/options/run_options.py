"""The options of a `run` command line, grouped by the function that takes them."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from typer import BadParameter

from edgeinfer_tui.options.number_lists import check_least
from edgeinfer_tui.prompt_source import unescaped
from edgeinfer_tui.text_files import text_of

LOADING = (
    "context",
    "engine",
    "device",
    "vram",
    "ram",
    "threads",
    "repack",
    "sparse",
    "draft",
    "draft_leaves",
    "kv",
    "chat_template",
    "thinking",
    "assume_pre_tokenizer",
)
SAMPLING = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "typical_p",
    "repeat_penalty",
    "repeat_last_n",
    "presence_penalty",
    "frequency_penalty",
    "dry_multiplier",
    "dry_base",
    "dry_allowed_length",
    "dry_penalty_last_n",
    "dry_sequence_breakers",
    "xtc_probability",
    "xtc_threshold",
    "mirostat",
    "mirostat_tau",
    "mirostat_eta",
    "logit_bias",
    "seed",
)
EMPTY: tuple[object, ...] = ([], (), {})
"""Values of a repeatable option that wasn't given; releases of typer differ."""
NONE_GIVEN = -1
"""Value of --max-tokens and --seed as in llama.cpp: no limit, and a random seed."""
LEAST = {
    "max_tokens": 1,
    "context": 1,
    "threads": 1,
    "seed": 0,
    "logprobs": 0,
    "answers": 1,
    "best_of": 1,
    "beams": 1,
}


@dataclass(frozen=True)
class RunOptions:
    """Parsed options of one `run`."""

    model: str | None
    prompt: str | None
    loading: dict[str, Any] = field(default_factory=dict)
    """Keywords of `edgeinfer.load` that were given."""
    answering: dict[str, Any] = field(default_factory=dict)
    """Keywords of `Model.stream` that were given."""
    counts: dict[str, Any] = field(default_factory=dict)
    """Keywords of `Model.generate` for the number of completions: n, best_of, beams."""
    system: str | None = None
    raw: bool | None = None
    session: str | None = None
    """Name or number of the chat to continue or to create."""
    resume: bool = False
    private: bool = False
    lines: bool = False
    """Each line of standard input is a prompt."""
    json: bool = False
    """Completions are written to stdout as JSON."""
    speed: bool = False
    verbose: bool = False


def run_options(options: Mapping[str, Any]) -> RunOptions:
    """Group the options of a command line; options that weren't given are omitted.

    Raises:
        BadParameter: a number below its minimum, a logit bias that isn't ID=BIAS, a template that
            isn't text, or options that exclude each other.
    """
    given = {name: value for name, value in options.items() if value is not None and value not in EMPTY}
    for name in ("max_tokens", "seed"):
        if given.get(name) == NONE_GIVEN:
            del given[name]
    for name, least in LEAST.items():
        check_least(f"--{name.replace('_', '-')}", given.get(name), least)
    if given.get("raw") and "system" in given:
        raise BadParameter("--system goes into the chat template, which --raw leaves out; drop one of them")
    _check_session(given)
    loading = {name: given[name] for name in LOADING if name in given}
    if "chat_template" in loading:
        loading["chat_template"] = text_of(loading["chat_template"], "--chat-template")
    if "template_arg" in given:
        loading["template_args"] = template_args(given["template_arg"])
    if "reference" in given:
        loading["references"] = list(given["reference"])
    if loading.get("draft") == "none":
        loading["draft"] = None
    for name in ("engine", "kv", "sparse", "thinking"):
        if name in loading:
            loading[name] = str(loading[name].value)
    return RunOptions(
        model=given.get("model"),
        prompt=_prompt(given),
        loading=loading,
        answering=_answering(given),
        counts=_counts(given),
        system=given.get("system"),
        raw=given.get("raw"),
        session=given.get("session"),
        resume=given.get("continue_", False),
        private=given.get("private", False),
        lines=given.get("lines", False),
        json=str(given.get("output", "text")) == "json",
        speed=given.get("speed", False),
        verbose=given.get("verbose", False),
    )


def template_args(given: Sequence[str]) -> dict[str, Any]:
    """Variables of a chat template from NAME=VALUE. Raises `BadParameter` for other formats."""
    found: dict[str, Any] = {}
    for text in given:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise BadParameter(f"saw {text[:40]!r}, wanted NAME=VALUE", param_hint="--template-arg")
        try:
            found[name] = json.loads(value)
        except ValueError:
            found[name] = value
    return found


def _prompt(given: Mapping[str, Any]) -> str | None:
    """The prompt of the command line, given in one of three ways."""
    names = {"prompt": "PROMPT", "prompt_option": "--prompt", "prompt_file": "--file"}
    found = [name for name in names if name in given]
    if len(found) > 1:
        raise BadParameter(f"{' and '.join(names[name] for name in found)} both give the prompt; drop one")
    if found == ["prompt_file"]:
        return text_of(given["prompt_file"], "--file").removesuffix("\n").removesuffix("\r")
    return given[found[0]] if found else None


def _counts(given: Mapping[str, Any]) -> dict[str, Any]:
    names = {"answers": "n", "best_of": "best_of", "beams": "beams"}
    return {names[option]: given[option] for option in names if option in given}


def _check_session(given: Mapping[str, Any]) -> None:
    named, resumed = "session" in given, given.get("continue_")
    if (named or resumed) and given.get("lines"):
        raise BadParameter("--session and --continue go on with one chat, --lines begins many; drop one")
    if named and resumed:
        raise BadParameter("--continue takes the last chat, --session the one named; drop one of them")
    if (named or resumed) and (given.get("private") or given.get("raw")):
        other = "--private keeps none" if given.get("private") else "--raw knows none"
        raise BadParameter(f"--session and --continue go on with a kept chat, {other}; drop one of them")


def _answering(given: Mapping[str, Any]) -> dict[str, Any]:
    answering = {name: given[name] for name in (*SAMPLING, "max_tokens", "logprobs") if name in given}
    if "on_full" in given:
        answering["on_full"] = str(given["on_full"].value)
    if "stop" in given:
        answering["stop"] = [unescaped(text) for text in given["stop"]]
    if "dry_sequence_breakers" in answering:
        answering["dry_sequence_breakers"] = tuple(map(unescaped, answering["dry_sequence_breakers"]))
    if "logit_bias" in answering:
        answering["logit_bias"] = dict(map(_bias, answering["logit_bias"]))
    for name, option in (("schema", "json_schema"), ("grammar", "grammar")):
        if option in given:
            answering[name] = text_of(given[option], f"--{option.replace('_', '-')}")
    return answering


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


def settings_again(settings: Mapping[str, Any], given: int) -> dict[str, Any]:
    """Settings for retry number `given`: the seed is increased by one each time, as with `--answers`."""
    seed = settings.get("seed")
    return dict(settings) if seed is None else {**settings, "seed": seed + given}
