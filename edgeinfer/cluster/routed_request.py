"""A request as the gateway of a cluster sends it to a replica, with the text that selects the replica."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from edgeinfer.serving.transport.local_exchange import LocalRequest

MAX_ROUTING_CHARACTERS = 20_000
"""Of a prompt; the router compares no more."""


@dataclass(frozen=True)
class RoutedRequest:
    """`prompt`: what Ray's prefix-aware router reads: the text with which the prompt begins. It is never
    empty, because the router divides by its length.
    """

    prompt: str
    request: LocalRequest


def routed(request: LocalRequest) -> RoutedRequest:
    """The request with its prompt's text; requests without a prompt have their path."""
    try:
        body = json.loads(request.body) if request.body else None
    except (ValueError, RecursionError):
        body = None  # the replica answers with the error
    text = prompt_text(body) if isinstance(body, dict) else ""
    return RoutedRequest(text[:MAX_ROUTING_CHARACTERS] or request.path, request)


def prompt_text(body: Mapping[str, Any]) -> str:
    """The text of a request's prompt, in the order in which templates write it: system prompt, messages."""
    names = ("system", "instructions", "messages", "prompt", "input")
    return "\n".join(text for name in names if (text := _text(body.get(name))))


def _text(value: Any) -> str:
    """The texts in a value of a body: of messages their contents, with the roles."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return "\n".join(map(_text, value))
    if isinstance(value, dict):
        parts = [value.get("role"), value.get("text"), _text(value.get("content"))]
        return "\n".join(part for part in parts if isinstance(part, str) and part)
    return ""
