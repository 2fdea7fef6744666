"""The chat store as the screen uses it: recording, listing and search."""

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from edgeinfer.history.recorder import Recorder
from edgeinfer.history.records import Found, StoredChat
from edgeinfer.history.store import ChatStore
from edgeinfer.history.tree import ChatTree, newest_end
from edgeinfer_tui.app.dialogue import Dialogue

Result = TypeVar("Result")


class Keeping:
    """The store at `path`. Writes happen on one thread, which calls `open` first; reads on any other."""

    def __init__(self, path: Path, name: str | None = None) -> None:
        """`name`: name for the first chat created."""
        self._path, self._name = path, name
        self._store: ChatStore | None = None

    def open(self) -> None:
        """Open the store for writing. Raises `ChatStoreError`."""
        self._store = ChatStore(self._path)

    def close(self) -> None:
        """Close the store. Must be called on the thread that opened it."""
        if self._store is not None:
            self._store.close()

    def recorded(self, dialogue: Dialogue, model: Callable[[], str], stored: StoredChat | None) -> None:
        """Start recording a dialogue; `model` returns the model's name, called when recording begins."""
        store = self._store
        assert store is not None

        def begin() -> StoredChat:
            name, self._name = self._name, None
            return store.new_chat(model(), dialogue.system, name)

        dialogue.recorder = Recorder(store, begin, stored)

    def dialogue(self, stored: StoredChat, at: int | None = None) -> Dialogue:
        """Load a saved chat on its current branch, or on the branch that contains message `at`."""
        with ChatStore(self._path) as store:
            stored = store.chat(str(stored.id))
            tree = ChatTree(store.turns(stored))
        tip = tree.with_number(stored.tip if at is None else at)
        return Dialogue(tree, tip and newest_end(tip), system=stored.system)

    def chats(self, most: int) -> list[StoredChat]:
        """The `most` most recently changed chats."""
        with ChatStore(self._path) as store:
            return store.chats(most)

    def search(self, text: str) -> list[Found]:
        """Messages that contain a text."""
        with ChatStore(self._path) as store:
            return store.search(text)
