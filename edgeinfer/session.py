"""A conversation: turns in, tokens out, the cache kept between turns, nothing dropped without saying so."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from edgeinfer.decoding import TokenStream
from edgeinfer.errors import ContextOverflowError
from edgeinfer.results import Generation

Message = dict[str, Any]


@dataclass(frozen=True)
class ChatEngine:
    """What a chat needs of its model."""

    encode: Callable[[Sequence[Message]], list[int]]
    """Messages through the chat template to ids, ending where the model is to answer."""
    stream: Callable[..., TokenStream]
    """(ids, dropped_turns=, on_end=, **settings) -> the answer's stream."""
    context: int
    used: Callable[[], int]


class Chat:
    """Turns of one conversation. `messages` holds all of them, whatever still fits the context."""

    def __init__(self, engine: ChatEngine, system: str | None = None, **settings: Any) -> None:
        self._engine = engine
        self._settings = settings
        self._dropped = 0
        self.system = system
        self.messages: list[Message] = []

    @property
    def context_used(self) -> int:
        """Tokens that the cache holds."""
        return self._engine.used()

    def say(self, text: str, **settings: Any) -> Generation:
        """The whole answer to `text`."""
        stream = self.stream(text, **settings)
        for _ in stream:
            pass
        return stream.result

    def stream(self, text: str, **settings: Any) -> TokenStream:
        """The answer to `text` as it comes; the turn is kept once the stream has ended or was cancelled.

        Raises `ContextOverflowError` if `text` alone doesn't fit, `ChatTemplateError` if the template fails.
        """
        turn: Message = {"role": "user", "content": text}
        wishes = {**self._settings, **settings}
        ids = self._fit([*self.messages, turn], wishes.get("max_tokens"))

        def keep(answer: Generation) -> None:
            if answer.ids or answer.finish_reason != "cancelled":
                self.messages += [turn, {"role": "assistant", "content": answer.text}]

        return self._engine.stream(ids, dropped_turns=self._dropped, on_end=keep, **wishes)

    def regenerate(self, **settings: Any) -> TokenStream:
        """Answer the last turn again. Raises `ValueError` if nothing has been said."""
        return self.edit(len(self._user_turns()) - 1, str(self._last_user_text()), **settings)

    def edit(self, index: int, text: str, **settings: Any) -> TokenStream:
        """Put `text` in place of user turn `index` (from 0); that turn and all after it are forgotten."""
        turns = self._user_turns()
        if not 0 <= index < len(turns):
            raise ValueError(f"turn {index}: this chat has {len(turns)} turns, counted from 0")
        del self.messages[turns[index] :]
        self._dropped = min(self._dropped, index)
        return self.stream(text, **settings)

    def clear(self) -> None:
        """Forget all turns; the system message stays."""
        self.messages.clear()
        self._dropped = 0

    def _user_turns(self) -> list[int]:
        return [i for i, message in enumerate(self.messages) if message["role"] == "user"]

    def _last_user_text(self) -> str:
        turns = self._user_turns()
        if not turns:
            raise ValueError("nothing has been said yet: there is no answer to give again")
        return str(self.messages[turns[-1]]["content"])

    def _encode(self, messages: Sequence[Message]) -> list[int]:
        system = [{"role": "system", "content": self.system}] if self.system else []
        return self._engine.encode([*system, *messages])

    def _fit(self, messages: Sequence[Message], max_tokens: int | None) -> list[int]:
        """The ids of the chat, without the oldest turns if it has outgrown the context.

        Once turns must go, a quarter of the context is freed at a time, so that the cache isn't read anew at
        every turn from then on.
        """
        context = self._engine.context
        room = max(1, min(max_tokens or context, context // 8))
        turns = len(messages) // 2
        ids = self._encode(messages[2 * self._dropped :])
        if len(ids) + room <= context:
            return ids
        while self._dropped < turns and len(ids) + max(room, context // 4) > context:
            self._dropped += 1
            ids = self._encode(messages[2 * self._dropped :])
        if len(ids) >= context:
            raise ContextOverflowError(
                f"the last message has {len(ids)} tokens with its template, the context holds {context}"
            )
        return ids
