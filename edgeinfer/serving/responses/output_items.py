"""Output items of the Responses API."""

from typing import Any

from edgeinfer.serving.responses.items import Item, new_id

Json = dict[str, Any]


def reasoning_item(text: str, is_summary: bool, item_id: str | None = None) -> Item:
    """A finished item of reasoning."""
    kind, name = ("summary_text", "summary") if is_summary else ("reasoning_text", "content")
    return {
        "type": "reasoning",
        "id": item_id or new_id("reasoning"),
        "summary": [],
        "content": [],
        "status": "completed",
        name: [{"type": kind, "text": text}],
    }


def message_item(text: str, logprobs: list[Json], item_id: str | None = None) -> Item:
    """A finished message."""
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
    return {
        "type": "message",
        "id": item_id or new_id("message"),
        "role": "assistant",
        "status": "completed",
        "content": [part],
    }


def call_item(call_id: str, name: str, arguments: str, item_id: str | None = None) -> Item:
    """A finished call of a function."""
    return {
        "type": "function_call",
        "id": item_id or new_id("function_call"),
        "call_id": call_id,
        "name": name,
        "arguments": arguments,
        "status": "completed",
    }
