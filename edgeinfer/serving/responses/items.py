"""Input items of the Responses API, checked, and as messages for a chat template."""

import secrets
from collections.abc import Iterable, Mapping
from typing import Any

from edgeinfer.errors import shown
from edgeinfer.serving.fields import RequestError, check_inner_fields, checked_list
from edgeinfer.serving.openai.messages import checked_messages

MAX_ITEMS = 4096
MAX_PARTS = 1024
Item = dict[str, Any]
_ROLES = ("user", "assistant", "system", "developer")
_TEXT_PARTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text")
_CALL_FIELDS = ("type", "id", "call_id", "status", "namespace", "caller")
_PREFIXES = {
    "message": "msg",
    "function_call": "fc",
    "function_call_output": "fco",
    "reasoning": "rs",
}


def new_id(kind: str) -> str:
    """An id of an item, for example `msg_1f0c…`."""
    return f"{_PREFIXES[kind]}_{secrets.token_hex(12)}"


def checked_items(value: Any) -> list[Item]:
    """The items of `input`, each with an id. Raises `RequestError`."""
    if isinstance(value, str):
        value = [{"role": "user", "content": value}]
    given = checked_list(value, "input", MAX_ITEMS, "a text or a list of items")
    return [_item(item, f"input[{index}]") for index, item in enumerate(given)]


def _item(item: Any, where: str) -> Item:
    kind = item.get("type", "message" if "role" in item else None) if isinstance(item, Mapping) else None
    if kind == "message":
        checked: Item = _message(item, where)
    elif kind == "function_call":
        check_inner_fields(item, where, ("name", "arguments", "async", *_CALL_FIELDS))
        checked = {name: _field(item, name, where) for name in ("call_id", "name", "arguments")}
    elif kind == "function_call_output":
        check_inner_fields(item, where, ("name", "output", *_CALL_FIELDS))
        checked = {"call_id": _field(item, "call_id", where), "output": _text(item.get("output"), where)}
    elif kind == "reasoning":
        checked = _reasoning(item, where)
    else:
        raise RequestError(
            f"{where}: saw {shown(kind or item)}, wanted a message, function_call, function_call_output or "
            "reasoning",
            param="input",
        )
    own_id = item.get("id")
    return {"type": kind, "id": own_id if isinstance(own_id, str) else new_id(kind), **checked}


def _message(item: Mapping[str, Any], where: str) -> Item:
    check_inner_fields(item, where, ("type", "id", "role", "content", "status"), ("phase", "name"))
    if item.get("role") not in _ROLES:
        raise RequestError(
            f"{where}.role: saw {shown(item.get('role'))}, wanted one of {', '.join(_ROLES)}", param="input"
        )
    kind = "output_text" if item["role"] == "assistant" else "input_text"
    part: Item = {"type": kind, "text": _text(item.get("content"), where)}
    if kind == "output_text":
        part["annotations"] = []
    return {"role": item["role"], "status": "completed", "content": [part]}


def _reasoning(item: Mapping[str, Any], where: str) -> Item:
    check_inner_fields(item, where, ("type", "id", "summary", "content", "encrypted_content", "status"))
    summary, content = (_text(item.get(name) or [], where) for name in ("summary", "content"))
    return {
        "summary": [{"type": "summary_text", "text": summary}] if summary else [],
        "content": [{"type": "reasoning_text", "text": content}] if content else [],
    }


def _text(content: Any, where: str) -> str:
    """The text of a content: a text, or parts of it."""
    if isinstance(content, str):
        return content
    parts = checked_list(content, f"{where}.content", MAX_PARTS, "a text or parts of it")
    texts = []
    for part in parts:
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind not in _TEXT_PARTS:
            raise RequestError(
                f"{where}: saw a part of type {shown(kind)}, only text is supported", param="input"
            )
        texts.append(_field(part, "text", where))
    return "".join(texts)


def _field(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{where}.{name}: saw {shown(value)}, wanted a text", param="input")
    return value


def messages_of(items: Iterable[Item], instructions: str) -> list[dict[str, Any]]:
    """The messages of a conversation. Raises `RequestError` for arguments that aren't JSON."""
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    names: dict[str, str] = {}
    for item in items:
        kind = item["type"]
        if kind == "message" and item["role"] != "assistant":
            messages.append({"role": item["role"], "content": item["content"][0]["text"]})
        elif kind == "function_call_output":
            call_id = item["call_id"]
            result = {"role": "tool", "tool_call_id": call_id, "content": item["output"]}
            messages.append(result | ({"name": names[call_id]} if call_id in names else {}))
        else:
            _add_to_assistant(messages, item, names)
    return checked_messages(messages)[0]


def _add_to_assistant(messages: list[dict[str, Any]], item: Item, names: dict[str, str]) -> None:
    """Add reasoning, a text or a call to the assistant's message, which may have begun."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or (item["type"] == "reasoning" and "tool_calls" in last):
        last = {"role": "assistant", "content": ""}
        messages.append(last)
    if item["type"] == "reasoning":
        parts = item["content"] or item["summary"]
        last["reasoning_content"] = parts[0]["text"] if parts else ""
    elif item["type"] == "message":
        last["content"] += item["content"][0]["text"]
    else:
        names[item["call_id"]] = item["name"]
        function = {"name": item["name"], "arguments": item["arguments"]}
        last.setdefault("tool_calls", []).append(
            {"id": item["call_id"], "type": "function", "function": function}
        )
