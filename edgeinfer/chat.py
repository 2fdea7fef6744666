"""A conversation: turns in, tokens out, the cache kept between turns, nothing dropped without saying so."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from edgeinfer.chat_templates.reasoning import without_thought
from edgeinfer.chat_templates.template_options import TemplateOptions
from edgeinfer.engine.kv_cache import shared_prefix
from edgeinfer.errors import ContextOverflowError, SettingError
from edgeinfer.generation.context_shift import SINKS
from edgeinfer.generation.token_stream import TokenStream, check_count
from edgeinfer.results import Generation
from edgeinfer.shown import shown

Message = dict[str, Any]


@dataclass(frozen=True)
class ChatEngine:
    """What a chat needs of its model."""

    encode: Callable[[Sequence[Message], TemplateOptions], list[int]]
    """Messages through the chat template to ids, ending where the model is to answer."""
    stream: Callable[..., TokenStream]
    """(ids, dropped_turns=, on_end=, **settings) -> the answer's stream."""
    context: int


class Chat:
    """Turns of one conversation.

    `messages` holds all of them, whatever still fits the context; `system` is what the model is told first,
    and never dropped.
    """

    def __init__(self, engine: ChatEngine, system: str | None = None, **settings: Any) -> None:
        self._engine = engine
        self._settings = settings
        self._dropped = 0
        self._used = 0
        self.system = system
        self.messages: list[Message] = []

    @property
    def context_used(self) -> int:
        """Tokens of the context that the conversation took with its last answer; 0 before the first."""
        return self._used

    def say(self, text: str, **settings: Any) -> Generation:
        """The whole answer to `text`; settings and `Raises` as for `stream`."""
        stream = self.stream(text, **settings)
        for _ in stream:
            pass
        return stream.result

    def stream(self, text: str, **settings: Any) -> TokenStream:
        """The answer to `text` as it comes; settings as for `Model.stream`.

        The turn is kept once the stream has ended, or was cancelled with something said.

        Raises:
            ContextOverflowError: `text` doesn't fit, even without the turns before it.
            ChatTemplateError: the template fails.
            SettingError: a setting out of its range, or no chat template.
        """
        return self._answer(list(self.messages), self._dropped, text, settings)

    def regenerate(self, **settings: Any) -> TokenStream:
        """Answer the last turn again; the new answer takes the old one's place as `edit` says.

        Raises:
            ValueError: nothing has been said yet.
        """
        turns = self._user_turns()
        if not turns:
            raise ValueError("nothing has been said yet: there is no answer to give again")
        return self.edit(len(turns) - 1, str(self.messages[turns[-1]]["content"]), **settings)

    def edit(self, index: int, text: str, **settings: Any) -> TokenStream:
        """Put `text` in place of user turn `index` (from 0) and answer it.

        The turn and all after it are forgotten once the new answer is kept; `Raises` as for `stream`, and:

        Raises:
            ValueError: there is no such turn.
        """
        turns = self._user_turns()
        if not 0 <= index < len(turns):
            raise ValueError(f"turn {index}: this chat has {len(turns)} turns, counted from 0")
        dropped = self._dropped if index > self._dropped else 0
        return self._answer(self.messages[: turns[index]], dropped, text, settings)

    def clear(self) -> None:
        """Forget all turns; the system message stays."""
        self.messages.clear()
        self._dropped = self._used = 0

    def _user_turns(self) -> list[int]:
        return [i for i, message in enumerate(self.messages) if message["role"] == "user"]

    def _answer(
        self, before: list[Message], dropped: int, text: str, settings: dict[str, Any]
    ) -> TokenStream:
        """Answer `text` behind `before`, whose first `dropped` turns no longer fit."""
        if not isinstance(text, str):
            raise SettingError(f"text: saw {type(text).__name__} {shown(text)}, wanted a text")
        turn: Message = {"role": "user", "content": text}
        wishes = {**self._settings, **settings}
        options = TemplateOptions(
            thinking=wishes.pop("thinking", None),
            args=wishes.pop("template_args", None) or {},
            constrained=wishes.get("schema") is not None or wishes.get("grammar") is not None,
        )
        if wishes.get("on_full", "stop") != "stop":
            ids, dropped = self._encode([*before, turn], options), 0
            wishes["keep"] = self._kept_tokens(options)
        else:
            ids, dropped = self._fit([*before, turn], dropped, wishes.get("max_tokens"), options)

        def keep(answer: Generation) -> None:
            if answer.finish_reason == "cancelled" and not answer.text:
                return
            self.messages[:] = [*before, turn, {"role": "assistant", "content": answer.text}]
            self._dropped = dropped
            self._used = len(answer.prompt_ids) + len(answer.ids) - answer.left_out_tokens

        return self._engine.stream(ids, dropped_turns=dropped, on_end=keep, **wishes)

    def _encode(self, messages: Sequence[Message], options: TemplateOptions) -> list[int]:
        """What was thought before earlier answers isn't read again: models are trained so."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        read = [
            {**message, "content": without_thought(message["content"])}
            if message["role"] == "assistant" and isinstance(message["content"], str)
            else message
            for message in messages
        ]
        return self._engine.encode([*system, *read], options)

    def _kept_tokens(self, options: TemplateOptions) -> int:
        """Tokens that stay when a chat slides: all up to its first message."""
        first, other = (self._encode([{"role": "user", "content": text}], options) for text in ("a", "b"))
        return max(SINKS, shared_prefix(first, other))

    def _fit(
        self, messages: list[Message], dropped: int, max_tokens: int | None, options: TemplateOptions
    ) -> tuple[list[int], int]:
        """The ids of the chat, and how many of its oldest turns had to be left out.

        Once turns must go, a quarter of the context is freed at a time, so that the cache isn't read anew at
        every turn from then on.
        """
        check_count("max_tokens", max_tokens)
        context = self._engine.context
        room = max(1, min(max_tokens or context, context // 8))
        turns = len(messages) // 2
        ids = self._encode(messages[2 * dropped :], options)
        if len(ids) + room <= context:
            return ids, dropped
        while dropped < turns and len(ids) + max(room, context // 4) > context:
            dropped += 1
            ids = self._encode(messages[2 * dropped :], options)
        if len(ids) >= context:
            told = "the last message, its template and the system message have"
            raise ContextOverflowError(
                f"{told if self.system else 'the last message and its template have'} {len(ids)} tokens, "
                f"the context holds {context}; shorten it, or take a larger context (--context, context=)"
            )
        return ids, dropped
