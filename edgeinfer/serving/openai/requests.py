"""Reads the bodies of OpenAI's chat completions and completions."""

from collections.abc import Mapping
from typing import Any

from edgeinfer.errors import shown
from edgeinfer.serving.completion.reasoning import EFFORT, template_args
from edgeinfer.serving.completion.requests import CompletionRequest, sampling_settings
from edgeinfer.serving.completion.tool_choice import tool_use
from edgeinfer.serving.fields import (
    RequestError,
    check_fields,
    check_inner_fields,
    checked_bool,
    checked_count,
    checked_list,
    checked_text,
)
from edgeinfer.serving.openai.known_fields import CHAT, TEXT
from edgeinfer.serving.openai.messages import checked_messages

MAX_CHOICES = 16
MAX_PROMPTS = 64
MAX_COMPLETIONS = 64
"""Maximum completions of one request: prompts times `n`."""
MAX_LOGPROBS = 20


def chat_request(body: Mapping[str, Any]) -> CompletionRequest:
    """POST /v1/chat/completions."""
    warnings = check_fields(body, CHAT)
    messages, more = checked_messages(body.get("messages"))
    settings, settings_warnings = _settings(body)
    settings |= template_args(body)
    top = checked_count(body, "top_logprobs", 0, 0, MAX_LOGPROBS)
    if checked_bool(body, "logprobs"):
        settings["logprobs"] = top
    elif top:
        raise RequestError("top_logprobs: needs logprobs true", param="top_logprobs")
    use = tool_use(body.get("tools"), body.get("tool_choice"), body.get("parallel_tool_calls"))
    return CompletionRequest(
        prompts=(messages,),
        settings=settings,
        tool_use=use,
        effort=body.get(EFFORT),
        warnings=(*warnings, *more, *settings_warnings),
        **_common(body),
    )


def text_request(body: Mapping[str, Any]) -> CompletionRequest:
    """POST /v1/completions."""
    warnings = check_fields(body, TEXT)
    prompts = _prompts(body.get("prompt", ""))
    settings, settings_warnings = _settings(body)
    settings.setdefault("max_tokens", 16)
    echo = checked_bool(body, "echo")
    if body.get("logprobs") is not None:
        if echo:
            raise RequestError(
                "echo: log probabilities of a prompt aren't supported; leave out echo or logprobs"
            )
        settings["logprobs"] = checked_count(body, "logprobs", 0, 0, MAX_LOGPROBS)
    common = _common(body)
    if len(prompts) * common["count"] > MAX_COMPLETIONS:
        saw = f"{len(prompts)} prompts with n {common['count']}"
        raise RequestError(f"prompt: saw {saw}, wanted {MAX_COMPLETIONS} completions at most", param="prompt")
    return CompletionRequest(
        prompts=prompts, settings=settings, echo=echo, warnings=(*warnings, *settings_warnings), **common
    )


def _prompts(prompt: Any) -> tuple[Any, ...]:
    several = isinstance(prompt, list) and prompt and not isinstance(prompt[0], int)
    prompts = tuple(checked_list(prompt, "prompt", MAX_PROMPTS, "texts")) if several else (prompt,)
    for each in prompts:
        if not isinstance(each, str) and not (isinstance(each, list) and all(type(i) is int for i in each)):
            raise RequestError(f"prompt: saw {shown(each)}, wanted a text or token ids", param="prompt")
    return prompts


def _common(body: Mapping[str, Any]) -> dict[str, Any]:
    streamed = checked_bool(body, "stream")
    options = body.get("stream_options")
    if options is not None:
        if not isinstance(options, Mapping):
            raise RequestError(
                f"stream_options: saw {shown(options)}, wanted an object", param="stream_options"
            )
        if not streamed:
            raise RequestError("stream_options: needs stream true", param="stream_options")
        check_inner_fields(options, "stream_options", ("include_usage",), ("include_obfuscation",))
    return {
        "model": checked_text(body, "model"),
        "count": checked_count(body, "n", 1, 1, MAX_CHOICES),
        "streamed": streamed,
        "usage_at_end": checked_bool(options or {}, "include_usage", "stream_options."),
    }


def _settings(body: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Keywords of `Model.stream`, with warnings."""
    settings = sampling_settings(body)
    limits = [body.get(name) for name in ("max_completion_tokens", "max_tokens")]
    if any(value is not None for value in limits):
        settings["max_tokens"] = limits[1] if limits[0] is None else limits[0]
    schema, warnings = response_schema(body.get("response_format"), "response_format")
    return settings | schema, warnings


def response_schema(response_format: Any, name: str) -> tuple[dict[str, Any], list[str]]:
    """The field `name`, a response format, as a schema, with warnings."""
    if response_format is None:
        return {}, []
    kind = response_format.get("type") if isinstance(response_format, Mapping) else None
    if kind in ("text", "json_object"):
        check_inner_fields(response_format, name, ("type",))
        return {} if kind == "text" else {"schema": {"type": "object"}}, []
    inner = response_format.get("json_schema") if isinstance(response_format, Mapping) else None
    if kind == "json_schema" and isinstance(inner, Mapping) and inner.get("schema") is not None:
        check_inner_fields(response_format, name, ("type", "json_schema"))
        known = ("name", "strict", "schema")
        warnings = check_inner_fields(inner, f"{name}.json_schema", known, ("description",))
        if inner.get("strict") is False:
            warnings.append(f"{name}.json_schema.strict: the schema is always enforced")
        return {"schema": inner["schema"]}, warnings
    raise RequestError(
        f"{name}: saw {shown(response_format)}, wanted text, json_object, or json_schema with a schema",
        param=name,
    )
