"""A conversation that is written to the store of chats as it goes."""

import sqlite3
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from edgeinfer_tui.library import Conversation, Stream

if TYPE_CHECKING:
    from edgeinfer.chats.records import State, StoredChat
    from edgeinfer.chats.store import ChatStore
    from edgeinfer.chats.turn_writer import TurnWriter
    from edgeinfer.results import Generation, Token

Tell = Callable[[str], None]


class KeptConversation:
    """As the conversation that it wraps; every turn goes into the store too.

    A store that can't be written is told once, through `tell`, and doesn't stop the conversation: what was
    said meanwhile is written as soon as there is room, or else isn't kept.
    """

    def __init__(
        self, inner: Conversation, store: "ChatStore", begin: "Callable[[], StoredChat]", tell: Tell
    ) -> None:
        """`begin` makes the chat in the store, once something is said."""
        self._inner, self._store, self._begin, self._tell = inner, store, begin, tell
        self._stored: StoredChat | None = None
        self._turns: list[int | None] = []
        """The store's number of each message; None: it isn't there."""

    def resume(self, stored: "StoredChat") -> None:
        """Go on with a chat of the store; turns without an answer are left out of what the model reads."""
        self._stored = stored
        line = self._store.branch(stored)
        for asked, answer in zip(line[::2], line[1::2], strict=False):
            if not answer.text:
                break
            self._inner.messages += [
                {"role": "user", "content": asked.text},
                {"role": "assistant", "content": answer.text},
            ]
            self._turns += [asked.id, answer.id]

    @property
    def messages(self) -> list[dict[str, Any]]:
        return self._inner.messages

    @messages.setter
    def messages(self, messages: list[dict[str, Any]]) -> None:
        self._inner.messages = messages

    @property
    def system(self) -> str | None:
        return self._inner.system

    @system.setter
    def system(self, text: str | None) -> None:
        self._inner.system = text
        if self._stored is not None:
            self._guarded(lambda: self._store.set_system(self._chat(), text))

    @property
    def context_used(self) -> int:
        return self._inner.context_used

    def stream(self, text: str, **settings: Any) -> Stream:
        return self._recorded(self._inner.stream(text, **settings), len(self._turns), text)

    def regenerate(self, **settings: Any) -> Stream:
        return self._recorded(self._inner.regenerate(**settings), len(self._turns) - 2, None)

    def edit(self, index: int, text: str, **settings: Any) -> Stream:
        return self._recorded(self._inner.edit(index, text, **settings), 2 * index, text)

    def clear(self) -> None:
        self._inner.clear()
        self._turns.clear()

    def _recorded(self, stream: Stream, place: int, text: str | None) -> Stream:
        """Record an answer behind the first `place` messages, and `text`; None: the message there, again."""
        before = self._turns[:place]
        asked = self._turns[place] if text is None else None
        writer = None
        try:
            if text is not None:
                asked = self._store.add_turn(self._chat().id, _last(before), "user", text).id
            writer = self._store.begin_turn(self._chat().id, asked)
        except (sqlite3.Error, _store_error()) as error:
            self._trouble(str(error))

        def keep() -> None:
            self._turns[:] = [*before, asked, None if writer is None else writer.turn]

        return _RecordedStream(stream, writer, keep, self._trouble)

    def _chat(self) -> "StoredChat":
        if self._stored is None:
            self._stored = self._begin()
        return self._stored

    def _guarded(self, write: Callable[[], object]) -> None:
        try:
            write()
        except sqlite3.Error as error:
            self._trouble(str(error))

    def _trouble(self, why: str) -> None:
        self._tell(f"this part of the chat isn't on the disk: {why}")


class _RecordedStream:
    """An answer's stream; its tokens are written before they are shown."""

    def __init__(
        self, inner: Stream, writer: "TurnWriter | None", keep: Callable[[], None], trouble: Tell
    ) -> None:
        self._inner, self._writer, self._keep, self._trouble = inner, writer, keep, trouble
        self._said = False

    def __iter__(self) -> "Iterator[Token]":
        try:
            for token in self._inner:
                self._said = self._said or bool(token.text)
                if token.text and self._writer is not None:
                    self._writer.add(token.text)
                yield token
        except Exception:
            self._finish("failed")
            raise
        self._finish("whole")

    def cancel(self) -> None:
        self._inner.cancel()
        self._finish("stopped")

    @property
    def result(self) -> "Generation":
        return self._inner.result

    def _finish(self, state: "State") -> None:
        if self._writer is not None and (trouble := self._writer.finish(state)):
            self._trouble(trouble)
        if self._said or state == "whole":
            self._keep()


def _last(turns: list[int | None]) -> int | None:
    """The last message that is in the store."""
    return next((turn for turn in reversed(turns) if turn is not None), None)


def _store_error() -> type[Exception]:
    from edgeinfer.chats.store import ChatStoreError

    return ChatStoreError
