"""The request for one completion, from the caller's arguments."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from edgeinfer.engine.protocols import Progress
from edgeinfer.errors import SettingError, shown
from edgeinfer.generation.context_shift import ContextShift
from edgeinfer.options import RunOptions, SamplingParams
from edgeinfer.results import FinishReason
from edgeinfer.structured.constraint import Constraint

if TYPE_CHECKING:
    from edgeinfer.chat import Message

Prompt = str | Sequence[int] | Sequence["Message"]
"""A text, token ids, or the messages of a chat."""

Prompts = list[str] | list[list[int]] | list[list["Message"]]
"""Several prompts."""

Restore = Callable[[list[int], int], int]
"""(ids, number of cached ones) -> number of cached ones now; larger if a prompt cache was restored."""


@dataclass(frozen=True)
class Request:
    """The request for one completion. `max_tokens` None: until the model ends or the context is full."""

    prompt_ids: list[int]
    sampling: SamplingParams
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    """None: no logprobs; n: of each sampled token and of the n best."""
    progress: Progress | None = None
    dropped_messages: int = 0
    constraint: Constraint | None = None
    """The allowed tokens; used up by this completion."""
    restore: Restore | None = None
    context_shift: ContextShift | None = None
    """The context shift policy; None: generation stops when the context is full."""

    def __post_init__(self) -> None:
        check_count("max_tokens", self.max_tokens)
        check_count("logprobs", self.logprobs)
        if self.progress is not None and not callable(self.progress):
            raise SettingError(
                f"progress: saw {shown(self.progress)}, wanted a function (done, total), or None"
            )
        for text in self.stop:
            if not isinstance(text, str):
                raise SettingError(f"stop: saw {shown(text)}, wanted a text, or a list of texts")

    def max_new_tokens(self, context: int) -> int:
        """Maximum number of tokens of the completion in a context of `context` tokens."""
        room = sys.maxsize if self.context_shift else context - len(self.prompt_ids)
        return room if self.max_tokens is None else min(room, self.max_tokens)

    def full_reason(self, context: int) -> FinishReason:
        """The finish reason of a completion with `max_new_tokens` tokens."""
        return "length" if self.max_new_tokens(context) == self.max_tokens else "context"


def check_count(name: str, value: object) -> None:
    """Raise `SettingError` unless `value` is an integer of at least 0, or None."""
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 0):
        raise SettingError(f"{name}: saw {shown(value)}, wanted a whole number of at least 0, or None")


def several_prompts(prompt: "Prompt | Sequence[Prompt]") -> "Sequence[Prompt] | None":
    """The prompts if they are a list of texts, of lists of ids, or of chats; None: it is one prompt."""
    if not isinstance(prompt, list | tuple) or not prompt:
        return None
    return prompt if isinstance(prompt[0], str | list | tuple) else None


def messages_of(prompt: Prompt) -> "Sequence[Message] | None":
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
    options: RunOptions,
    sampling: SamplingParams,
    *,
    dropped_messages: int = 0,
    constraint: Constraint | None = None,
    restore: Restore | None = None,
    context_shift: ContextShift | None = None,
) -> Request:
    """The request for one completion."""
    return Request(
        prompt_ids=ids,
        sampling=sampling,
        max_tokens=options.max_tokens,
        stop=options.stop,
        logprobs=options.logprobs,
        progress=options.progress,
        dropped_messages=dropped_messages,
        constraint=constraint,
        restore=restore,
        context_shift=context_shift,
    )
