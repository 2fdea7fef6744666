"""Responses of a chat by a model of this machine: the messages that fit, and their tokens."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from edgeinfer.chat import NOT_IN_CHATS, ChatPrompt, Message
from edgeinfer.chat_templates.template_options import TemplateOptions
from edgeinfer.chat_templates.tool_calls import ParsedReply, Tool, parse_tool_calls
from edgeinfer.engine.kv_cache import shared_prefix
from edgeinfer.errors import ContextOverflowError
from edgeinfer.generation.context_shift import SINKS
from edgeinfer.generation.token_stream import TokenStream
from edgeinfer.options.run_options import run_options
from edgeinfer.results import Generation


@dataclass(frozen=True)
class LocalChatEngine:
    """A `ChatEngine` of the functions of a model."""

    encode: Callable[[Sequence[Message], TemplateOptions], list[int]]
    """Messages to token ids through the chat template, with the prompt of the assistant's message at the
    end; the template options say what becomes of the reasoning of earlier responses.
    """
    stream: Callable[..., TokenStream]
    """(ids, options, sampling, keep=, dropped_messages=, on_end=) -> the response's stream."""
    decode: Callable[[Sequence[int]], str]
    """The text of ids, with the control tokens: the marks of tool calls."""
    context: int

    def respond(self, prompt: ChatPrompt, on_end: Callable[[Generation], None]) -> TokenStream:
        run, sampling = run_options(prompt.options, NOT_IN_CHATS)
        template, kept_tokens = run.template_options, SINKS
        if run.context_overflow == "stop":
            ids, dropped = self._fit(prompt, run.max_tokens, template)
        else:
            ids, dropped = self._encoded(prompt.messages, prompt.system, template), 0
            kept_tokens = self._kept_tokens(prompt.system, template)
        return self.stream(ids, run, sampling, keep=kept_tokens, dropped_messages=dropped, on_end=on_end)

    def parsed(self, response: Generation, tools: Sequence[Tool]) -> ParsedReply:
        return parse_tool_calls(self.decode(response.ids), tools)

    def _encoded(
        self, messages: Sequence[Message], system: str | None, options: TemplateOptions
    ) -> list[int]:
        first: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
        return self.encode([*first, *messages], options)

    def _kept_tokens(self, system: str | None, options: TemplateOptions) -> int:
        """Number of tokens kept at the start in a context shift: all up to the first message."""
        first, other = (
            self._encoded([{"role": "user", "content": text}], system, options) for text in ("a", "b")
        )
        return max(SINKS, shared_prefix(first, other))

    def _fit(
        self, prompt: ChatPrompt, max_tokens: int | None, options: TemplateOptions
    ) -> tuple[list[int], int]:
        """Return the token ids of the chat, and the number of oldest user messages that were dropped with
        their responses.

        When messages must be dropped, a quarter of the context is freed at once, so that the prompt isn't
        prefilled again at every message.
        """
        context, messages, dropped = self.context, prompt.messages, prompt.dropped
        room = max(1, min(max_tokens or context, context // 8))
        starts = [i for i, message in enumerate(messages) if message["role"] == "user"]

        def encoded() -> list[int]:
            return self._encoded(messages[starts[dropped] if dropped else 0 :], prompt.system, options)

        ids = encoded()
        if len(ids) + room <= context:
            return ids, dropped
        while dropped < len(starts) - 1 and len(ids) + max(room, context // 4) > context:
            dropped += 1
            ids = encoded()
        if len(ids) >= context:
            subject = "the last message, its template and the system message have"
            raise ContextOverflowError(
                f"{subject if prompt.system else 'the last message and its template have'} {len(ids)} "
                f"tokens, the context holds {context}; shorten it, or take a larger context (context=)"
            )
        return ids, dropped
