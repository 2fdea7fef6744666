"""Writes a chat's tree into the store as it grows; a store that can't be written is caught up with later."""

import sqlite3
from collections.abc import Callable

from edgeinfer.history.records import State, StoredChat
from edgeinfer.history.store import ChatStore, ChatStoreError
from edgeinfer.history.tree import Turn
from edgeinfer.history.turn_writer import MessageWriter


class Recorder:
    """Of one chat. Belongs to the thread that opened the store.

    `trouble`: why the store couldn't be written at the last attempt; None: all that was said is there. What
    is missing stays in memory, and is written with the next turn for which there is room.
    """

    def __init__(
        self, store: ChatStore, begin: Callable[[], StoredChat], stored: StoredChat | None = None
    ) -> None:
        """`begin` makes the chat in the store, once something is said; `stored`: it is there already."""
        self._store, self._begin, self.stored = store, begin, stored
        self.trouble: str | None = None
        self._writer: MessageWriter | None = None
        self._unfinished: list[tuple[MessageWriter, State]] = []

    @property
    def snapshot_owner(self) -> str | None:
        """As `ChatStore.snapshot_owner`; None: the chat isn't in the store."""
        return None if self.stored is None else self._store.snapshot_owner(self.stored.id)

    def record(self, turn: Turn) -> None:
        """A turn that is whole, and those before it that are missing."""
        self._attempt(lambda: self._ensure(turn))

    def begin(self, answer: Turn) -> None:
        """An answer that will come in pieces, behind turns that are recorded first if they are missing."""

        def begin() -> None:
            before = None if answer.parent is None else self._ensure(answer.parent)
            self._writer = self._store.begin_turn(self._chat().id, before)
            answer.stored = self._writer.turn

        self._writer = None
        self._attempt(begin)

    def add(self, text: str) -> None:
        """A piece of the answer: safe on the disk when this returns, unless there is `trouble`."""
        if self._writer is not None and text:
            self._writer.add(text)
            self.trouble = self._writer.trouble

    def finish(self, answer: Turn, state: State) -> None:
        """The answer, whose text is whole in memory, has ended."""
        writer, self._writer = self._writer, None
        if writer is None:
            self.record(answer)
            return
        self.trouble = writer.finish(state)
        if self.trouble:
            self._unfinished.append((writer, state))

    def leave_at(self, turn: Turn) -> None:
        """The chat will be gone on with at the newest end behind `turn`."""
        if turn.stored is not None:
            number = turn.stored
            self._attempt(lambda: self._store.move_to(self._store.turn(number)))

    def set_system(self, text: str | None) -> None:
        """What the model is told first from now on; nothing to write before the chat has begun."""
        if self.stored is not None:
            chat = self.stored
            self._attempt(lambda: self._store.set_system(chat, text))

    def set_model(self, model: str) -> None:
        """The model that goes on with the chat."""
        if self.stored is not None:
            chat = self.stored
            self._attempt(lambda: self._store.set_model(chat, model))

    def _chat(self) -> StoredChat:
        if self.stored is None:
            self.stored = self._begin()
        return self.stored

    def _ensure(self, turn: Turn) -> int:
        """The number of a turn, which is written if it isn't there."""
        missing = []
        at: Turn | None = turn
        while at is not None and at.stored is None:
            missing.append(at)
            at = at.parent
        before = None if at is None else at.stored
        for one in reversed(missing):
            before = self._store.add_turn(self._chat().id, before, one.role, one.text, one.state).id
            one.stored = before
        assert before is not None
        return before

    def _attempt(self, write: Callable[[], object]) -> None:
        try:
            write()
        except (sqlite3.Error, ChatStoreError) as error:
            self.trouble = str(error)
            return
        left = [(writer, state) for writer, state in self._unfinished if writer.finish(state)]
        self._unfinished = left
        self.trouble = left[0][0].trouble if left else None
