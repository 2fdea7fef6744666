"""A chat: messages in, tokens out, the KV cache kept between messages, dropped messages reported."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

from edgeinfer.chat_templates.template_options import TemplateOptions
from edgeinfer.chat_templates.tool_calls import ParsedReply, ToolCall, parse_tool_calls
from edgeinfer.engine.native_engine import shared_prefix
from edgeinfer.errors import ContextOverflowError, SettingError, shown
from edgeinfer.generation.context_shift import SINKS
from edgeinfer.generation.token_stream import TokenStream
from edgeinfer.options import ChatKeywords
from edgeinfer.options.run_options import COUNTS, PROMPT_FORMAT, run_options
from edgeinfer.results import Generation

Message = dict[str, Any]
NOT_IN_CHATS = COUNTS + PROMPT_FORMAT


@dataclass(frozen=True)
class ChatEngine:
    """The functions of a model that a chat uses."""

    encode: Callable[[Sequence[Message], TemplateOptions], list[int]]
    """Messages to token ids through the chat template, with the prompt of the assistant's message at the
    end; the template options say what becomes of the reasoning of earlier responses.
    """
    stream: Callable[..., TokenStream]
    """(ids, options, sampling, keep=, dropped_messages=, on_end=) -> the response's stream."""
    decode: Callable[[Sequence[int]], str]
    """The text of ids, with the control tokens: the marks of tool calls."""
    context: int


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

    def stream_results(self, results: Sequence[Any], **options: Unpack[ChatKeywords]) -> TokenStream:
        """Stream the response to the results of the last response's tool calls, in their order: texts, or
        values for JSON. Options and `Raises` as for `stream`.
        """
        calls = self.tool_calls
        if isinstance(results, str) or len(results) != len(calls) or not calls:
            seen = "a text" if isinstance(results, str) else f"{len(results)} results"
            raise SettingError(f"results: saw {seen}, wanted one for each of {len(calls)} tool calls")
        given = [_tool_message(call, result) for call, result in zip(calls, results, strict=True)]
        return self._respond(list(self.messages), self._dropped, given, options)

    def stream(self, text: str, **options: Unpack[ChatKeywords]) -> TokenStream:
        """Stream the response to `text`; options as for `Model.stream`, except `raw`.

        The messages are added to the history when the stream ends, or when it is cancelled after some text.
        With `tools`, `tool_calls` then has the calls of the response, and `say_results` continues.

        Raises:
            ContextOverflowError: `text` doesn't fit, even without earlier messages.
            ChatTemplateError: the template fails.
            SettingError: an option out of its range, or no chat template.
        """
        return self._respond(list(self.messages), self._dropped, [_user_message(text)], options)

    def regenerate(self, **options: Unpack[ChatKeywords]) -> TokenStream:
        """Generate the last response again; the new one replaces it as described for `edit`.

        Raises:
            ValueError: the history is empty.
        """
        indices = self._user_indices()
        if not indices:
            raise ValueError("there is no response yet to generate again")
        return self.edit(len(indices) - 1, str(self.messages[indices[-1]]["content"]), **options)

    def edit(self, index: int, text: str, **options: Unpack[ChatKeywords]) -> TokenStream:
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
    ) -> TokenStream:
        """Stream the response to the messages `added` after `before`, of which the first `dropped` user
        messages, with all that followed them, no longer fit.
        """
        run, sampling = run_options({**self._options, **options}, NOT_IN_CHATS)
        template, kept_tokens = run.template_options, SINKS
        if run.context_overflow == "stop":
            ids, dropped = self._fit([*before, *added], dropped, run.max_tokens, template)
        else:
            ids, dropped = self._encode([*before, *added], template), 0
            kept_tokens = self._kept_tokens(template)

        def keep(response: Generation) -> None:
            if response.finish_reason == "cancelled" and not response.text:
                return
            reply = ParsedReply(response.text, ())
            if run.tools:
                parsed = parse_tool_calls(self._engine.decode(response.ids), run.tools)
                reply = parsed if parsed.calls else reply
            self.tool_calls = reply.calls
            self.messages[:] = [*before, *added, _assistant_message(reply)]
            self._dropped = dropped
            self._context_used = len(response.prompt_ids) + len(response.ids) - response.evicted_tokens

        return self._engine.stream(
            ids, run, sampling, keep=kept_tokens, dropped_messages=dropped, on_end=keep
        )

    def _encode(self, messages: Sequence[Message], options: TemplateOptions) -> list[int]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return self._engine.encode([*system, *messages], options)

    def _kept_tokens(self, options: TemplateOptions) -> int:
        """Number of tokens kept at the start in a context shift: all up to the first message."""
        first, other = (self._encode([{"role": "user", "content": text}], options) for text in ("a", "b"))
        return max(SINKS, shared_prefix(first, other))

    def _fit(
        self, messages: list[Message], dropped: int, max_tokens: int | None, options: TemplateOptions
    ) -> tuple[list[int], int]:
        """Return the token ids of the chat, and the number of oldest user messages that were dropped with
        their responses.

        When messages must be dropped, a quarter of the context is freed at once, so that the prompt isn't
        prefilled again at every message.
        """
        context = self._engine.context
        room = max(1, min(max_tokens or context, context // 8))
        starts = [i for i, message in enumerate(messages) if message["role"] == "user"]

        def encoded() -> list[int]:
            return self._encode(messages[starts[dropped] if dropped else 0 :], options)

        ids = encoded()
        if len(ids) + room <= context:
            return ids, dropped
        while dropped < len(starts) - 1 and len(ids) + max(room, context // 4) > context:
            dropped += 1
            ids = encoded()
        if len(ids) >= context:
            subject = "the last message, its template and the system message have"
            raise ContextOverflowError(
                f"{subject if self.system else 'the last message and its template have'} {len(ids)} tokens, "
                f"the context holds {context}; shorten it, or take a larger context (context=)"
            )
        return ids, dropped


def _result(stream: TokenStream) -> Generation:
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
