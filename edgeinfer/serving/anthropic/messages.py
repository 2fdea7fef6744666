"""Messages and content blocks of Anthropic's API, as messages for a chat template."""

from collections.abc import Mapping
from typing import Any

from edgeinfer.errors import shown
from edgeinfer.serving.fields import RequestError, check_inner_fields, checked_list

MAX_MESSAGES = 4096
MAX_BLOCKS = 1024
_IGNORED = ("cache_control", "citations", "caller", "toolset_name")
"""Fields of a block that need no answer: prompts are cached without them."""
Message = dict[str, Any]


def system_text(value: Any, warnings: list[str]) -> str:
    """The system prompt: a text, or blocks of it."""
    return "" if value is None else "\n\n".join(_texts(value, "system"))


def checked_messages(value: Any, warnings: list[str]) -> list[Message]:
    """The messages in OpenAI's format. Raises `RequestError`."""
    given = checked_list(value, "messages", MAX_MESSAGES, "a list of messages")
    if not given:
        raise RequestError("messages: saw none, wanted at least one", param="messages")
    names: dict[str, str] = {}
    messages: list[Message] = []
    for index, message in enumerate(given):
        where = f"messages[{index}]"
        role = message.get("role") if isinstance(message, Mapping) else None
        if role not in ("user", "assistant", "system"):
            raise RequestError(
                f"{where}: saw {shown(message)}, wanted a message of role user or assistant", param="messages"
            )
        check_inner_fields(message, where, ("role", "content"))
        if role == "assistant":
            messages.append(_assistant(message.get("content"), where, names))
        else:
            messages += _user(message.get("content"), where, names, role)
    if messages[-1]["role"] == "assistant":
        raise RequestError(
            "messages: the last one is the assistant's; wanted one of the user, since a response can't "
            "continue a text here",
            param="messages",
        )
    return messages


def _assistant(content: Any, where: str, names: dict[str, str]) -> Message:
    message: Message = {"role": "assistant", "content": ""}
    calls = []
    for block in _blocks(content, where):
        kind = block.get("type")
        if kind == "text":
            message["content"] += _text(block, where)
        elif kind == "thinking":
            check_inner_fields(block, where, ("type", "thinking", "signature", *_IGNORED))
            thinking = _field(block, "thinking", where)
            message["reasoning_content"] = message.get("reasoning_content", "") + thinking
        elif kind == "tool_use":
            calls.append(_call(block, where, names))
        elif kind != "redacted_thinking":
            raise _unknown_block(block, where, "text, thinking or tool_use")
    if calls:
        message["tool_calls"] = calls
    return message


def _call(block: Mapping[str, Any], where: str, names: dict[str, str]) -> Message:
    check_inner_fields(block, where, ("type", "id", "name", "input", *_IGNORED))
    name, call_id = _field(block, "name", where), _field(block, "id", where)
    arguments = block.get("input")
    if not isinstance(arguments, Mapping):
        raise RequestError(f"{where}: saw the input {shown(arguments)}, wanted an object", param="messages")
    names[call_id] = name
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": dict(arguments)}}


def _user(content: Any, where: str, names: dict[str, str], role: str) -> list[Message]:
    """The results of tools, then the texts."""
    results: list[Message] = []
    texts: list[str] = []
    for block in _blocks(content, where):
        kind = block.get("type")
        if kind == "text":
            texts.append(_text(block, where))
        elif kind == "tool_result":
            results.append(_result(block, where, names))
        else:
            raise _unknown_block(block, where, "text or tool_result")
    if texts or not results:
        results.append({"role": role, "content": "\n\n".join(texts)})
    return results


def _result(block: Mapping[str, Any], where: str, names: dict[str, str]) -> Message:
    check_inner_fields(block, where, ("type", "tool_use_id", "content", "is_error", *_IGNORED))
    call_id = _field(block, "tool_use_id", where)
    if call_id not in names:
        raise RequestError(
            f"{where}: saw a tool_result for {shown(call_id)}, wanted the id of an earlier tool_use",
            param="messages",
        )
    content = block.get("content")
    text = "" if content is None else "\n".join(_texts(content, where))
    return {"role": "tool", "tool_call_id": call_id, "name": names[call_id], "content": text}


def _texts(content: Any, where: str) -> list[str]:
    """The texts of blocks that must be texts."""
    texts = []
    for block in _blocks(content, where):
        if block.get("type") != "text":
            raise _unknown_block(block, where, "text")
        texts.append(_text(block, where))
    return texts


def _blocks(content: Any, where: str) -> list[Mapping[str, Any]]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    blocks = checked_list(content, f"{where}.content", MAX_BLOCKS, "a text or content blocks")
    for block in blocks:
        if not isinstance(block, Mapping):
            raise RequestError(f"{where}: saw {shown(block)}, wanted content blocks", param="messages")
    return blocks


def _text(block: Mapping[str, Any], where: str) -> str:
    check_inner_fields(block, where, ("type", "text", *_IGNORED))
    return _field(block, "text", where)


def _field(block: Mapping[str, Any], name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise RequestError(f"{where}.{name}: saw {shown(value)}, wanted a text", param="messages")
    return value


def _unknown_block(block: Mapping[str, Any], where: str, expected: str) -> RequestError:
    return RequestError(
        f"{where}: saw a block of type {shown(block.get('type'))}, wanted {expected}", param="messages"
    )
