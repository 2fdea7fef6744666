"""Builds a request from the caller's arguments: text, ids or messages, and settings by name."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from edgeinfer.chat import Message
from edgeinfer.engine.protocols import Progress
from edgeinfer.errors import SettingError
from edgeinfer.generation.context_shift import ContextShift
from edgeinfer.generation.token_stream import Recall, Request
from edgeinfer.plain_numbers import plain_number
from edgeinfer.sampling import SamplerSettings
from edgeinfer.shown import shown
from edgeinfer.structured.constraint import Constraint

Prompt = str | Sequence[int] | Sequence[Message]
"""A text, token ids, or the messages of a chat."""


def messages_of(prompt: Prompt) -> Sequence[Message] | None:
    """The prompt if it is a chat. Raises `SettingError` for invalid messages."""
    if isinstance(prompt, str | bytes | bytearray) or not isinstance(prompt, Sequence) or not prompt:
        return None
    if not isinstance(prompt[0], Mapping):
        return None
    for message in prompt:
        if not _is_message(message):
            raise SettingError(f"prompt: saw {shown(message)}, wanted messages with a role and a content")
    return [dict(message) for message in prompt if isinstance(message, Mapping)]


def _is_message(message: object) -> bool:
    """Whether it has a role and a content (text or parts); no content is needed with tool calls."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        return False
    content = message.get("content")
    return isinstance(content, str | list) or (content is None and bool(message.get("tool_calls")))


def request_of(
    ids: list[int],
    *,
    max_tokens: int | None = None,
    stop: str | Iterable[str] | None = None,
    logprobs: int | None = None,
    progress: Progress | None = None,
    dropped_turns: int = 0,
    constraint: Constraint | None = None,
    recall: Recall | None = None,
    sliding: ContextShift | None = None,
    **sampling: Any,
) -> Request:
    """The request for one completion; `sampling`: the fields of `SamplerSettings`. Raises `SettingError`."""
    return Request(
        prompt_ids=ids,
        sampling=SamplerSettings.from_fields(sampling),
        max_tokens=plain_number(max_tokens),
        stop=_stops(stop),
        logprobs=plain_number(logprobs),
        progress=progress,
        dropped_turns=dropped_turns,
        constraint=constraint,
        recall=recall,
        sliding=sliding,
    )


def _stops(stop: object) -> tuple[str, ...]:
    if stop is None or isinstance(stop, str):
        return () if stop is None else (stop,)
    if not isinstance(stop, Iterable):
        raise SettingError(f"stop: saw {shown(stop)}, wanted a text, or a list of texts")
    return tuple(stop)
