"""A chat: messages in, tokens out, the KV cache kept between messages, dropped messages reported."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Unpack

from edgeinfer.chat_templates.template_options import TemplateOptions
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
    context: int


class Chat:
    """One chat.

    `messages` holds the whole history, including messages that no longer fit the context; `system`: system
    prompt, never dropped.
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

    @property
    def context_used(self) -> int:
        """Tokens in the context after the last response; 0 before the first."""
        return self._context_used

    def say(self, text: str, **options: Unpack[ChatKeywords]) -> Generation:
        """Return the complete response to `text`; options and `Raises` as for `stream`."""
        stream = self.stream(text, **options)
        for _ in stream:
            pass
        return stream.result

    def stream(self, text: str, **options: Unpack[ChatKeywords]) -> TokenStream:
        """Stream the response to `text`; options as for `Model.stream`, except `raw` and `tools`.

        The messages are added to the history when the stream ends, or when it is cancelled after some text.

        Raises:
            ContextOverflowError: `text` doesn't fit, even without earlier messages.
            ChatTemplateError: the template fails.
            SettingError: an option out of its range, or no chat template.
        """
        return self._respond(list(self.messages), self._dropped, text, options)

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
        return self._respond(self.messages[: indices[index]], dropped, text, options)

    def clear(self) -> None:
        """Remove all messages; the system prompt is kept."""
        self.messages.clear()
        self._dropped = self._context_used = 0

    def _user_indices(self) -> list[int]:
        return [i for i, message in enumerate(self.messages) if message["role"] == "user"]

    def _respond(self, before: list[Message], dropped: int, text: str, options: ChatKeywords) -> TokenStream:
        """Stream the response to `text` after the messages `before`, of which the first `dropped` no longer
        fit.
        """
        if not isinstance(text, str):
            raise SettingError(f"text: saw {type(text).__name__} {shown(text)}, wanted a text")
        user_message: Message = {"role": "user", "content": text}
        run, sampling = run_options({**self._options, **options}, NOT_IN_CHATS)
        template, kept_tokens = run.template_options, SINKS
        if run.context_overflow == "stop":
            ids, dropped = self._fit([*before, user_message], dropped, run.max_tokens, template)
        else:
            ids, dropped = self._encode([*before, user_message], template), 0
            kept_tokens = self._kept_tokens(template)

        def keep(response: Generation) -> None:
            if response.finish_reason == "cancelled" and not response.text:
                return
            self.messages[:] = [*before, user_message, {"role": "assistant", "content": response.text}]
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
        """Return the token ids of the chat, and the number of oldest messages that were dropped.

        When messages must be dropped, a quarter of the context is freed at once, so that the prompt isn't
        prefilled again at every message.
        """
        context = self._engine.context
        room = max(1, min(max_tokens or context, context // 8))
        indices = len(messages) // 2
        ids = self._encode(messages[2 * dropped :], options)
        if len(ids) + room <= context:
            return ids, dropped
        while dropped < indices and len(ids) + max(room, context // 4) > context:
            dropped += 1
            ids = self._encode(messages[2 * dropped :], options)
        if len(ids) >= context:
            subject = "the last message, its template and the system message have"
            raise ContextOverflowError(
                f"{subject if self.system else 'the last message and its template have'} {len(ids)} tokens, "
                f"the context holds {context}; shorten it, or take a larger context (--context, context=)"
            )
        return ids, dropped
