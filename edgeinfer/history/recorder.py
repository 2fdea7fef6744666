"""Records a chat's message tree in the store; messages that can't be written are written later."""

import sqlite3
from collections.abc import Callable

from edgeinfer.history.message_writer import MessageWriter
from edgeinfer.history.records import State, StoredChat
from edgeinfer.history.store import ChatStore, ChatStoreError
from edgeinfer.history.tree import ChatMessage


class Recorder:
    """Recorder of one chat. Belongs to the thread that opened the store.

    `last_error`: error of the last write attempt; None: everything is saved. Missing messages stay in memory
    and are written with the next message once the store is writable.
    """

    def __init__(
        self, store: ChatStore, begin: Callable[[], StoredChat], stored: StoredChat | None = None
    ) -> None:
        """`begin` creates the chat in the store at the first message; `stored`: the existing chat."""
        self._store, self._begin, self.stored = store, begin, stored
        self.last_error: str | None = None
        self._writer: MessageWriter | None = None
        self._unfinished: list[tuple[MessageWriter, State]] = []

    @property
    def snapshot_owner(self) -> str | None:
        """As `ChatStore.snapshot_owner`; None: the chat isn't in the store."""
        return None if self.stored is None else self._store.snapshot_owner(self.stored.id)

    def record(self, message: ChatMessage) -> None:
        """Record a complete message, and earlier ones that are missing."""
        self._attempt(lambda: self._ensure(message))

    def begin(self, response: ChatMessage) -> None:
        """Start a streamed response; its missing predecessors are recorded first."""

        def begin() -> None:
            before = None if response.parent is None else self._ensure(response.parent)
            self._writer = self._store.begin_message(self._chat().id, before)
            response.stored = self._writer.message

        self._writer = None
        self._attempt(begin)

    def add(self, text: str) -> None:
        """Append a piece of the response; it is on disk when this returns, unless `last_error` is set."""
        if self._writer is not None and text:
            self._writer.add(text)
            self.last_error = self._writer.last_error

    def replace(self, response: ChatMessage) -> None:
        """Write the text of the response in progress again, which has changed."""
        if self._writer is not None:
            self._writer.replace(response.text)
            self.last_error = self._writer.last_error

    def finish(self, response: ChatMessage, state: State) -> None:
        """End the response, whose complete text is in memory."""
        writer, self._writer = self._writer, None
        if writer is None:
            self.record(response)
            return
        self.last_error = writer.finish(state)
        if self.last_error:
            self._unfinished.append((writer, state))

    def set_tip(self, message: ChatMessage) -> None:
        """Set the chat's tip to the newest leaf below `message`."""
        if message.stored is not None:
            number = message.stored
            self._attempt(lambda: self._store.move_to(self._store.message(number)))

    def set_system(self, text: str | None) -> None:
        """Set the system prompt; nothing is written before the chat is created."""
        if self.stored is not None:
            chat = self.stored
            self._attempt(lambda: self._store.set_system(chat, text))

    def set_model(self, model: str) -> None:
        """Set the model of the chat."""
        if self.stored is not None:
            chat = self.stored
            self._attempt(lambda: self._store.set_model(chat, model))

    def _chat(self) -> StoredChat:
        if self.stored is None:
            self.stored = self._begin()
        return self.stored

    def _ensure(self, message: ChatMessage) -> int:
        """The id of a message, which is written if it isn't in the store."""
        missing = []
        at: ChatMessage | None = message
        while at is not None and at.stored is None:
            missing.append(at)
            at = at.parent
        before = None if at is None else at.stored
        for one in reversed(missing):
            before = self._store.add_message(self._chat().id, before, one.role, one.text, one.state).id
            one.stored = before
        assert before is not None
        return before

    def _attempt(self, write: Callable[[], object]) -> None:
        try:
            write()
        except (sqlite3.Error, ChatStoreError) as error:
            self.last_error = str(error)
            return
        left = [(writer, state) for writer, state in self._unfinished if writer.finish(state)]
        self._unfinished = left
        self.last_error = left[0][0].last_error if left else None
