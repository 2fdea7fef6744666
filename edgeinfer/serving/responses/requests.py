"""Reads the bodies of /v1/responses."""

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from edgeinfer.errors import shown
from edgeinfer.options.option_field import MAX_WHOLE
from edgeinfer.serving.completion.reasoning import template_args
from edgeinfer.serving.completion.requests import CompletionRequest, sampling_settings
from edgeinfer.serving.completion.tool_choice import MAX_TOOLS, tool_use
from edgeinfer.serving.fields import (
    SAMPLING,
    KnownFields,
    RequestError,
    check_fields,
    check_inner_fields,
    checked_bool,
    checked_count,
    checked_list,
    checked_text,
)
from edgeinfer.serving.openai.known_fields import WITHOUT_EFFECT
from edgeinfer.serving.openai.requests import MAX_LOGPROBS, response_schema
from edgeinfer.serving.responses.items import Item, checked_items, messages_of
from edgeinfer.serving.responses.store import ResponseStore

_READ = (
    *("model", "input", "instructions", "previous_response_id", "store", "stream", "stream_options"),
    *("tools", "tool_choice", "parallel_tool_calls", "reasoning", "text", "max_output_tokens"),
    *("truncation", "top_logprobs", "include", "metadata", "chat_template_kwargs"),
)
RESPONSES = KnownFields(
    frozenset((*_READ, *SAMPLING)),
    {
        "background": "not supported here; stream the response, or wait for it",
        "conversation": "not supported here; use previous_response_id",
        "prompt": "not supported here; send its text in instructions and input",
        **dict.fromkeys(
            ("access_programs", "background_options", "image", "moderation"), "not supported here"
        ),
        "max_tool_calls": "not supported here; there are no built-in tools",
        "messages": "no such field; did you mean input?",
        "response_format": "no such field; did you mean text.format?",
        "reasoning_effort": "no such field; did you mean reasoning.effort?",
    },
    WITHOUT_EFFECT - {"store", "metadata"} | {"context_management"},
)
LOGPROBS = "message.output_text.logprobs"
_INCLUDES = (LOGPROBS, "reasoning.encrypted_content")
_SUMMARIES = ("auto", "concise", "detailed", "none")


@dataclass(frozen=True)
class ResponsesRequest(CompletionRequest):
    """A request of a response. `input`: its items; `conversation`: those before them. `shown`: the fields of
    the request that the response repeats.
    """

    input: tuple[Item, ...] = ()
    conversation: tuple[Item, ...] = ()
    shown: dict[str, Any] = field(default_factory=dict)
    store: bool = True
    summarizes: bool = False
    """Whether the reasoning is returned as a summary."""
    id: str = field(default_factory=lambda: f"resp_{secrets.token_hex(16)}")
    created: int = field(default_factory=lambda: int(time.time()))


def responses_request(body: Mapping[str, Any], store: ResponseStore) -> ResponsesRequest:
    """POST /v1/responses. Raises `RequestError`."""
    warnings = check_fields(body, RESPONSES)
    items = tuple(checked_items(body.get("input")))
    conversation: tuple[Item, ...] = ()
    if previous := checked_text(body, "previous_response_id"):
        conversation = store.get(previous, "previous_response_id").conversation
    if not items and not conversation:
        raise RequestError("input: saw none, wanted a text or a list of items", param="input")
    instructions = checked_text(body, "instructions")
    settings = sampling_settings(body) | template_args(body) | _schema(body, warnings) | _logprobs(body)
    if body.get("max_output_tokens") is not None:
        settings["max_tokens"] = checked_count(body, "max_output_tokens", 0, 1, MAX_WHOLE)
    effort, summary = _reasoning(body.get("reasoning"))
    tools = _functions(body.get("tools"))
    return ResponsesRequest(
        model=checked_text(body, "model"),
        prompts=(messages_of((*conversation, *items), instructions),),
        settings=settings,
        tool_use=tool_use(tools, body.get("tool_choice"), body.get("parallel_tool_calls")),
        effort=effort,
        effort_field="reasoning.effort",
        streamed=checked_bool(body, "stream"),
        truncates=_truncates(body.get("truncation")),
        warnings=tuple(warnings),
        input=items,
        conversation=conversation,
        shown=_shown(body),
        store=body.get("store") is None or checked_bool(body, "store"),
        summarizes=summary not in (None, "none"),
    )


def _shown(body: Mapping[str, Any]) -> dict[str, Any]:
    parallel = body.get("parallel_tool_calls")
    return {
        "instructions": body.get("instructions"),
        "max_output_tokens": body.get("max_output_tokens"),
        "metadata": body.get("metadata") or {},
        "parallel_tool_calls": True if parallel is None else parallel,
        "previous_response_id": body.get("previous_response_id"),
        "reasoning": body.get("reasoning") or {"effort": None, "summary": None},
        "temperature": body.get("temperature"),
        "text": body.get("text") or {"format": {"type": "text"}},
        "tool_choice": body.get("tool_choice") or "auto",
        "tools": body.get("tools") or [],
        "top_p": body.get("top_p"),
        "truncation": body.get("truncation") or "disabled",
    }


def _reasoning(value: Any) -> tuple[str | None, str | None]:
    """The effort and the kind of summary."""
    if value is None:
        return None, None
    if not isinstance(value, Mapping):
        raise RequestError(f"reasoning: saw {shown(value)}, wanted an object", param="reasoning")
    check_inner_fields(value, "reasoning", ("effort", "summary", "generate_summary"), ("context", "mode"))
    summary = value.get("summary") or value.get("generate_summary")
    if summary is not None and summary not in _SUMMARIES:
        raise RequestError(
            f"reasoning.summary: saw {shown(summary)}, wanted one of {', '.join(_SUMMARIES)}",
            param="reasoning",
        )
    return value.get("effort"), summary


def _schema(body: Mapping[str, Any], warnings: list[str]) -> dict[str, Any]:
    """`text.format` as a schema."""
    text = body.get("text")
    if text is None:
        return {}
    if not isinstance(text, Mapping):
        raise RequestError(f"text: saw {shown(text)}, wanted an object", param="text")
    check_inner_fields(text, "text", ("format", "verbosity"))
    if text.get("verbosity") not in (None, "medium"):
        warnings.append("text.verbosity: has no effect here")
    form = text.get("format")
    if isinstance(form, Mapping) and form.get("type") == "json_schema":
        inner = {name: value for name, value in form.items() if name != "type"}
        form = {"type": "json_schema", "json_schema": inner}
    schema, more = response_schema(form, "text.format")
    warnings += more
    return schema


def _logprobs(body: Mapping[str, Any]) -> dict[str, Any]:
    included = checked_list(body.get("include"), "include", len(_INCLUDES), "a list of names")
    for name in included:
        if name not in _INCLUDES:
            raise RequestError(
                f"include: saw {shown(name)}, wanted one of {', '.join(_INCLUDES)}", param="include"
            )
    top = checked_count(body, "top_logprobs", 0, 0, MAX_LOGPROBS)
    return {"logprobs": top} if LOGPROBS in included or top else {}


def _truncates(value: Any) -> bool:
    if value not in (None, "auto", "disabled"):
        raise RequestError(f"truncation: saw {shown(value)}, wanted auto or disabled", param="truncation")
    return bool(value == "auto")


def _functions(value: Any) -> list[Any]:
    """The tools in the format of chat completions."""
    tools = []
    for index, tool in enumerate(checked_list(value, "tools", MAX_TOOLS, "a list of functions")):
        kind = tool.get("type") if isinstance(tool, Mapping) else None
        if kind != "function":
            raise RequestError(
                f"tools[{index}]: saw a tool of type {shown(kind)}, wanted function; tools that run on "
                "OpenAI's servers aren't here",
                param="tools",
            )
        known = ("name", "description", "parameters")
        ignored = ("strict", "defer_loading", "allowed_callers", "output_schema", "async")
        check_inner_fields(tool, f"tools[{index}]", ("type", *known, *ignored))
        tools.append({"type": "function", "function": {name: tool[name] for name in known if tool.get(name)}})
    return tools
