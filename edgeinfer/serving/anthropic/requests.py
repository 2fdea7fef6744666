"""Reads the bodies of /v1/messages and /v1/messages/count_tokens."""

from collections.abc import Mapping
from typing import Any

from edgeinfer.errors import shown
from edgeinfer.serving.anthropic.messages import checked_messages, system_text
from edgeinfer.serving.completion.reasoning import template_args
from edgeinfer.serving.completion.requests import CompletionRequest, sampling_settings
from edgeinfer.serving.completion.tool_choice import MAX_TOOLS, ToolUse, forced_use, tool_use
from edgeinfer.serving.fields import (
    SAMPLING,
    KnownFields,
    RequestError,
    check_fields,
    check_inner_fields,
    checked_bool,
    checked_list,
    checked_text,
)

_READ = ("model", "messages", "system", "tools", "tool_choice", "thinking", "output_config")
_LIBRARY = tuple(name for name in SAMPLING if name != "stop")
MESSAGES = KnownFields(
    frozenset((*_READ, "max_tokens", "stop_sequences", "stream", "chat_template_kwargs", *_LIBRARY)),
    {
        "mcp_servers": "not supported here; offer their tools in tools",
        "container": "not supported here",
        "stop": "no such field; did you mean stop_sequences?",
    },
    frozenset(("metadata", "service_tier", "context_management", "cache_control", "inference_geo", "speed"))
    | {"diagnostics", "user_profile_id", "workspace_id"},
)
_TOOL_FIELDS = (
    *("cache_control", "strict", "eager_input_streaming", "defer_loading", "input_examples"),
    "allowed_callers",
)
"""Fields of a tool that the response doesn't depend on here."""
_EFFORTS = ("low", "medium", "high", "xhigh", "max")


def messages_request(body: Mapping[str, Any]) -> CompletionRequest:
    """POST /v1/messages."""
    if body.get("max_tokens") is None:
        raise RequestError("max_tokens: saw none, wanted the maximum number of tokens", param="max_tokens")
    return _request(body)


def count_request(body: Mapping[str, Any]) -> CompletionRequest:
    """POST /v1/messages/count_tokens."""
    return _request(body)


def _request(body: Mapping[str, Any]) -> CompletionRequest:
    warnings = check_fields(body, MESSAGES)
    messages = checked_messages(body.get("messages"), warnings)
    if system := system_text(body.get("system"), warnings):
        messages.insert(0, {"role": "system", "content": system})
    stops = {"stop": body["stop_sequences"]} if body.get("stop_sequences") is not None else {}
    settings = sampling_settings({**body, **stops})
    if body.get("max_tokens") is not None:
        settings["max_tokens"] = body["max_tokens"]
    effort, name = _effort(body, warnings)
    settings |= _schema(body.get("output_config")) | template_args(body)
    return CompletionRequest(
        model=checked_text(body, "model"),
        prompts=(messages,),
        settings=settings,
        tool_use=_tool_use(body, warnings),
        effort=effort,
        effort_field=name,
        streamed=checked_bool(body, "stream"),
        warnings=tuple(warnings),
    )


def _effort(body: Mapping[str, Any], warnings: list[str]) -> tuple[str | None, str]:
    """The requested reasoning and the field that has it."""
    thinking = body.get("thinking")
    if thinking is not None and not isinstance(thinking, Mapping):
        raise RequestError(f"thinking: saw {shown(thinking)}, wanted an object", param="thinking")
    kind = (thinking or {}).get("type")
    if thinking is not None:
        warnings += check_inner_fields(thinking, "thinking", ("type",), ("budget_tokens", "display"))
        if kind not in ("enabled", "disabled", "adaptive"):
            raise RequestError(
                f"thinking.type: saw {shown(kind)}, wanted enabled, disabled or adaptive", param="thinking"
            )
    if kind == "disabled":
        return "none", "thinking"
    config = body.get("output_config")
    effort = config.get("effort") if isinstance(config, Mapping) else None
    if effort is not None and effort not in _EFFORTS:
        raise RequestError(
            f"output_config.effort: saw {shown(effort)}, wanted one of {', '.join(_EFFORTS)}",
            param="output_config",
        )
    if effort is not None:
        return effort, "output_config.effort"
    return ("on", "thinking") if kind == "enabled" else (None, "thinking")


def _schema(config: Any) -> dict[str, Any]:
    """`output_config.format` as a schema."""
    if config is None:
        return {}
    if not isinstance(config, Mapping):
        raise RequestError(f"output_config: saw {shown(config)}, wanted an object", param="output_config")
    check_inner_fields(config, "output_config", ("effort", "format"))
    form = config.get("format")
    if form is None:
        return {}
    if not isinstance(form, Mapping) or form.get("type") != "json_schema" or form.get("schema") is None:
        raise RequestError(
            f"output_config.format: saw {shown(form)}, wanted json_schema with a schema",
            param="output_config",
        )
    check_inner_fields(form, "output_config.format", ("type", "schema"), ("name", "strict"))
    return {"schema": form["schema"]}


def _tool_use(body: Mapping[str, Any], warnings: list[str]) -> ToolUse:
    tools = [
        _function(tool, f"tools[{index}]", warnings)
        for index, tool in enumerate(checked_list(body.get("tools"), "tools", MAX_TOOLS, "a list of tools"))
    ]
    choice = body.get("tool_choice")
    if choice is None:
        return tool_use(tools, None, None)
    kind = choice.get("type") if isinstance(choice, Mapping) else None
    if kind not in ("auto", "any", "tool", "none"):
        raise RequestError(
            f"tool_choice: saw {shown(choice)}, wanted an object of type auto, any, tool or none",
            param="tool_choice",
        )
    check_inner_fields(choice, "tool_choice", ("type", "name", "disable_parallel_tool_use"))
    parallel = not checked_bool(choice, "disable_parallel_tool_use", "tool_choice.")
    if kind in ("auto", "none"):
        return tool_use(tools, kind, parallel)
    tool_use(tools, None, None)  # checks the tools
    return forced_use(tools, checked_text(choice, "name") if kind == "tool" else None)


def _function(tool: Any, name: str, warnings: list[str]) -> dict[str, Any]:
    """A tool in OpenAI's format."""
    if not isinstance(tool, Mapping) or not isinstance(tool.get("name"), str):
        raise RequestError(f"{name}: saw {shown(tool)}, wanted a tool with a name", param="tools")
    if tool.get("type", "custom") not in ("custom", None):
        raise RequestError(
            f"{name}: saw a tool of type {shown(tool['type'])}, wanted one with an input_schema; tools that "
            "run on Anthropic's servers aren't here",
            param="tools",
        )
    check_inner_fields(tool, name, ("name", "description", "input_schema", "type", *_TOOL_FIELDS))
    function = {"name": tool["name"], "parameters": tool.get("input_schema") or {}}
    if tool.get("description"):
        function["description"] = checked_text(tool, "description")
    return {"type": "function", "function": function}
