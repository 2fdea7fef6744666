"""The fields of requests to other servers: the library's options under the names that each server has."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edgeinfer.errors import SettingError, shown
from edgeinfer.options.option_field import options_of
from edgeinfer.options.run_options import RunOptions, run_options
from edgeinfer.options.sampling_params import SamplingParams

DEFAULT_TEXT_TOKENS = 1024
NO_LIMIT, MAX_TOKENS = -1, 2**31 - 1
STANDARD = (
    "seed",
    "temperature",
    "top_p",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "stop",
    "n",
)
"""Options that are fields of OpenAI's API with the same names."""
_SAMPLERS = (*STANDARD, *(name for name in options_of(SamplingParams) if name not in STANDARD))
_OWN = (
    *STANDARD,
    *(n for kind in (SamplingParams, RunOptions) for n, i in options_of(kind).items() if i.server),
)
REFUSED = {
    "beams": "OpenAI's API has no beam search",
    "best_of": "OpenAI's API has it no longer; give n",
    "logprobs": "token ids aren't part of OpenAI's API",
}
"""Options that no server of this API takes, with the reason."""


@dataclass(frozen=True)
class ServerKind:
    """A server program. `fields`: option -> field; `switches_reasoning`: the chat template's variable turns
    it on and off; `grammar`: the path of the field of a grammar, empty if there is none; `text_tokens`: the
    `max_tokens` of a text without a limit, for which OpenAI's API has no value and a default of 16.
    """

    name: str
    fields: Mapping[str, str] = field(default_factory=dict)
    max_tokens: str = "max_tokens"
    switches_reasoning: bool = False
    grammar: tuple[str, ...] = ()
    text_tokens: int | None = DEFAULT_TEXT_TOKENS

    def has_limit(self, body: Mapping[str, Any]) -> bool:
        """Whether a request limits the tokens of its completion below the context."""
        return body.get(self.max_tokens, body.get("max_tokens")) not in (None, NO_LIMIT, MAX_TOKENS)


def _named(*names: str, **renamed: str) -> dict[str, str]:
    return {name: name for name in (*STANDARD, *names)} | renamed


_VLLM = _named("top_k", "min_p", repeat_penalty="repetition_penalty")
KINDS = {
    "edgeinfer": ServerKind(
        "edgeinfer", {n: n for n in _OWN if n != "grammar"}, grammar=("grammar",), text_tokens=MAX_TOKENS
    ),
    "llamacpp": ServerKind(
        "llama.cpp", {n: n for n in _SAMPLERS}, grammar=("grammar",), text_tokens=NO_LIMIT
    ),
    "vllm": ServerKind(
        "vLLM", _VLLM, switches_reasoning=True, grammar=("structured_outputs", "grammar"), text_tokens=None
    ),
    "sglang": ServerKind("SGLang", _VLLM, switches_reasoning=True, grammar=("ebnf",)),
    "openai": ServerKind("OpenAI", _named(), "max_completion_tokens"),
    "system": ServerKind("OpenAI", _named(), "max_completion_tokens"),
}
"""`owned_by` of a server's models -> the program."""
UNKNOWN = ServerKind("the server", _named("top_k", "min_p", "repeat_penalty", "typical_p"))
"""Other programs get usual names; they may ignore them."""


def kind_of(owner: object) -> ServerKind:
    """The program whose models have this `owned_by`."""
    return KINDS.get(owner, UNKNOWN) if isinstance(owner, str) else UNKNOWN


def request_fields(given: Mapping[str, Any], kind: ServerKind) -> dict[str, Any]:
    """The fields of a request, from the keywords of a completion. Options that weren't given have the
    server's defaults.

    Raises:
        SettingError: an invalid value, or an option that the server doesn't have.
    """
    run, sampling = run_options(given, without=())
    fields: dict[str, Any] = {}
    for name in given:
        value = getattr(run if hasattr(run, name) else sampling, name)
        if value is None or value in ((), {}) or name in ("progress", "raw", "template_args"):
            continue
        fields |= _fields(name, value, kind)
    if run.template_args:
        fields["chat_template_kwargs"] = {**fields.get("chat_template_kwargs", {}), **run.template_args}
    return fields


def _fields(name: str, value: Any, kind: ServerKind) -> dict[str, Any]:
    """The fields of one option."""
    if name in REFUSED:
        raise SettingError(f"{name}: {REFUSED[name]}; leave it out, or the engine")
    if name == "max_tokens":
        return {kind.max_tokens: value}
    if name == "tools":
        return {"tools": [_tool(tool) for tool in value]}
    if name == "thinking":
        return _reasoning(value, kind)
    if name == "schema":
        return {"response_format": _response_format(value)}
    if name == "grammar" and kind.grammar:
        outer, *inner = kind.grammar
        return {outer: {inner[0]: value} if inner else value}
    if name in kind.fields:
        return {kind.fields[name]: list(value) if isinstance(value, tuple) else value}
    if name == "context_overflow" and value == "stop":
        return {}
    raise SettingError(f"{name}: {kind.name} doesn't have it; leave it out, or the engine")


def _reasoning(thinking: str, kind: ServerKind) -> dict[str, Any]:
    """The reasoning that is requested: a switch of the chat template, or an effort."""
    if kind.switches_reasoning and thinking in ("on", "off"):
        return {"chat_template_kwargs": {"enable_thinking": thinking == "on"}}
    if kind is KINDS["edgeinfer"]:
        return {"reasoning_effort": "none" if thinking == "off" else thinking}
    return {"reasoning_effort": {"off": "none", "on": "medium"}.get(thinking, thinking)}


def _response_format(schema: Any) -> dict[str, Any]:
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError):
            raise SettingError(f"schema: saw {shown(schema)}, wanted a JSON schema") from None
    named = {"name": "response", "schema": schema, "strict": True}
    return {"type": "json_schema", "json_schema": named}


def _tool(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool in OpenAI's form; the library also takes its inner object."""
    return tool if "function" in tool else {"type": "function", "function": tool}
