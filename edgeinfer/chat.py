"""A chat: messages in, tokens out, the KV cache kept between messages, dropped messages reported."""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Unpack

from edgeinfer.chat_templates.tool_calls import ParsedReply, Tool, ToolCall
from edgeinfer.errors import SettingError, shown
from edgeinfer.options import ChatKeywords
from edgeinfer.options.run_options import COUNTS, PROMPT_FORMAT, run_options
from edgeinfer.results import Generation, Token

Message = dict[str, Any]
NOT_IN_CHATS = COUNTS + PROMPT_FORMAT


class ResponseStream(Protocol):
    """The tokens of a response; `result` is the completion so far, or the whole one at the end."""

    def __iter__(self) -> Iterator[Token]: ...

    def __next__(self) -> Token: ...

    def cancel(self) -> None: ...

    @property
    def result(self) -> Generation: ...


@dataclass(frozen=True)
class ChatPrompt:
    """What a response is generated for. `dropped`: oldest user messages that no longer fit the context, with
    all that followed each; `options`: the keywords that were given, checked.
    """

    messages: list[Message]
    system: str | None
    dropped: int
    options: Mapping[str, Any]


class ChatEngine(Protocol):
    """What answers a chat: a model of this machine, or a server."""

    def respond(self, prompt: ChatPrompt, on_end: Callable[[Generation], None]) -> ResponseStream:
        """Stream the response; `dropped_messages` of its result are those that don't fit now. `on_end` is
        called once with the completion, however it ended. Raises as `Chat.stream`.
        """
        ...

    def parsed(self, response: Generation, tools: Sequence[Tool]) -> ParsedReply:
        """The text of a response, and its calls of the offered tools."""
        ...


class Chat:
    """One chat.

    `messages` holds the whole history, including messages that no longer fit the context; `system`: system
    prompt, never dropped. `tool_calls`: those of the last response, if it was given `tools`.
    """

    def __init__(
        self, engine: ChatEngine, system: str | None = None, **options: Unpack[ChatKeywords]
    ) -> None:
        run_options(options, NOT_IN_CHATS)
        self._engine = engine
        self._options = options
        self._dropped = 0
        self._context_used = 0
        self.system = system
        self.messages: list[Message] = []
        self.tool_calls: tuple[ToolCall, ...] = ()

    @property
    def context_used(self) -> int:
        """Tokens in the context after the last response; 0 before the first."""
        return self._context_used

    def say(self, text: str, **options: Unpack[ChatKeywords]) -> Generation:
        """Return the complete response to `text`; options and `Raises` as for `stream`."""
        return _result(self.stream(text, **options))

    def say_results(self, results: Sequence[Any], **options: Unpack[ChatKeywords]) -> Generation:
        """Return the response to the results of the last response's tool calls; as `stream_results`."""
        return _result(self.stream_results(results, **options))

    def stream_results(self, results: Sequence[Any], **options: Unpack[ChatKeywords]) -> ResponseStream:
        """Stream the response to the results of the last response's tool calls, in their order: texts, or
        values for JSON. Options and `Raises` as for `stream`.
        """
        calls = self.tool_calls
        if isinstance(results, str) or len(results) != len(calls) or not calls:
            seen = "a text" if isinstance(results, str) else f"{len(results)} results"
            raise SettingError(f"results: saw {seen}, wanted one for each of {len(calls)} tool calls")
        given = [_tool_message(call, result) for call, result in zip(calls, results, strict=True)]
        return self._respond(list(self.messages), self._dropped, given, options)

    def stream(self, text: str, **options: Unpack[ChatKeywords]) -> ResponseStream:
        """Stream the response to `text`; options as for `Model.stream`, except `raw`.

        The messages are added to the history when the stream ends, or when it is cancelled after some text.
        With `tools`, `tool_calls` then has the calls of the response, and `say_results` continues.

        Raises:
            ContextOverflowError: `text` doesn't fit, even without earlier messages.
            ChatTemplateError: the template fails.
            SettingError: an option out of its range, or no chat template.
        """
        return self._respond(list(self.messages), self._dropped, [_user_message(text)], options)

    def regenerate(self, **options: Unpack[ChatKeywords]) -> ResponseStream:
        """Generate the last response again; the new one replaces it as described for `edit`.

        Raises:
            ValueError: the history is empty.
        """
        indices = self._user_indices()
        if not indices:
            raise ValueError("there is no response yet to generate again")
        return self.edit(len(indices) - 1, str(self.messages[indices[-1]]["content"]), **options)

    def edit(self, index: int, text: str, **options: Unpack[ChatKeywords]) -> ResponseStream:
        """Replace user message `index` (from 0) by `text` and generate its response.

        The message and all later ones are removed once the new response is complete; `Raises` as for
        `stream`, and:

        Raises:
            ValueError: there is no such message.
        """
        indices = self._user_indices()
        if not 0 <= index < len(indices):
            raise ValueError(f"message {index}: this chat has {len(indices)} user messages, counted from 0")
        dropped = self._dropped if index > self._dropped else 0
        return self._respond(self.messages[: indices[index]], dropped, [_user_message(text)], options)

    def clear(self) -> None:
        """Remove all messages; the system prompt is kept."""
        self.messages.clear()
        self.tool_calls = ()
        self._dropped = self._context_used = 0

    def _user_indices(self) -> list[int]:
        return [i for i, message in enumerate(self.messages) if message["role"] == "user"]

    def _respond(
        self, before: list[Message], dropped: int, added: list[Message], options: ChatKeywords
    ) -> ResponseStream:
        """Stream the response to the messages `added` after `before`, of which the first `dropped` user
        messages, with all that followed them, no longer fit.
        """
        given = {**self._options, **options}
        run, _ = run_options(given, NOT_IN_CHATS)

        def keep(response: Generation) -> None:
            if response.finish_reason == "cancelled" and not response.text:
                return
            reply = ParsedReply(response.text, ())
            if run.tools:
                parsed = self._engine.parsed(response, run.tools)
                reply = parsed if parsed.calls else reply
            self.tool_calls = reply.calls
            self.messages[:] = [*before, *added, _assistant_message(reply)]
            self._dropped = response.dropped_messages
            self._context_used = response.context_tokens

        return self._engine.respond(ChatPrompt([*before, *added], self.system, dropped, given), keep)


def _result(stream: ResponseStream) -> Generation:
    for _ in stream:
        pass
    return stream.result


def _user_message(text: object) -> Message:
    if not isinstance(text, str):
        raise SettingError(f"text: saw {type(text).__name__} {shown(text)}, wanted a text")
    return {"role": "user", "content": text}


def _assistant_message(reply: ParsedReply) -> Message:
    """A response in the form of chat templates."""
    message: Message = {"role": "assistant", "content": reply.content}
    if reply.calls:
        functions = [{"name": call.name, "arguments": call.arguments} for call in reply.calls]
        message["tool_calls"] = [{"type": "function", "function": function} for function in functions]
    return message


def _tool_message(call: ToolCall, result: Any) -> Message:
    """The result of a tool in the form of chat templates. Raises `SettingError`: it is no JSON value."""
    try:
        content = result if isinstance(result, str) else json.dumps(result, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        raise SettingError(f"results: saw {shown(result)}, wanted a text or a value for JSON") from None
    return {"role": "tool", "name": call.name, "content": content}
