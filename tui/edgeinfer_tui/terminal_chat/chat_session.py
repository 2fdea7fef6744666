"""The saved chat that a `run` continues, and its conversation."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from edgeinfer_tui.failures import say
from edgeinfer_tui.library import Conversation, LoadedModel
from edgeinfer_tui.options.run_options import RunOptions
from edgeinfer_tui.output.progress_line import shown_ago
from edgeinfer_tui.terminal_chat.kept_conversation import KeptConversation

if TYPE_CHECKING:
    from edgeinfer.history.recorder import Recorder
    from edgeinfer.history.records import StoredChat
    from edgeinfer.history.store import ChatStore


@dataclass
class ChatSession:
    """The store, and the chat to continue; `stored` None: a new chat."""

    store: "ChatStore"
    stored: "StoredChat | None"
    name: str | None = None
    recorder: "Recorder | None" = None
    """Recorder of the conversation, once it has begun."""

    @property
    def snapshot_owner(self) -> str | None:
        """Owner whose deletion also deletes the chat's prompt cache; None: the chat isn't in the store."""
        return None if self.recorder is None else self.recorder.snapshot_owner

    @property
    def model(self) -> str | None:
        """The model of the chat to continue."""
        return None if self.stored is None else self.stored.model

    def conversation(self, loaded: LoadedModel, wishes: RunOptions) -> Conversation:
        """The model's conversation, with the messages of the saved chat."""
        from edgeinfer.history.recorder import Recorder
        from edgeinfer.history.tree import ChatTree

        before = None if self.stored is None else self.stored.system
        inner = loaded.chat(system=before if wishes.system is None else wishes.system)

        def begin() -> "StoredChat":
            return self.store.new_chat(lasting_name(wishes.model), inner.system, self.name)

        tree = ChatTree([] if self.stored is None else self.store.turns(self.stored))
        tip = None if self.stored is None else tree.with_number(self.stored.tip)
        self.recorder = Recorder(self.store, begin, self.stored)
        return KeptConversation(inner, self.recorder, tree, tip, say)

    def greeting(self) -> str | None:
        """Message about the chat that is continued; None: it is a new one."""
        if self.stored is None:
            return None
        ago = shown_ago(time.time() - self.stored.changed)
        return f"going on with chat {self.stored.label}: {self.stored.title} ({ago})"


def open_session(wishes: RunOptions, prompted: bool, tell: Callable[[str], None] = say) -> ChatSession | None:
    """The chat that the command line selects; None: the chat is not saved. `prompted`: there is a prompt,
    which is saved only in a chat selected by name. `tell` is called with the reason if an unnamed chat can't
    be saved.

    Raises:
        ChatStoreError: no chat to continue, an invalid name, or the store can't be opened.
    """
    from edgeinfer.history.store import ChatStore, ChatStoreError, check_name

    named = wishes.resume or wishes.session is not None
    if wishes.private or (prompted and not named):
        return None
    try:
        store = ChatStore()
    except ChatStoreError as error:
        if named:
            raise
        tell(f"this chat won't be kept: {error}")
        return None
    if wishes.resume:
        last = store.chats(1)
        if not last:
            raise ChatStoreError("--continue: there is no chat yet to go on with")
        return ChatSession(store, last[0])
    if wishes.session is not None and store.has(wishes.session):
        return ChatSession(store, store.chat(wishes.session))
    if wishes.session is not None:
        check_name(wishes.session)
    return ChatSession(store, None, wishes.session)


def lasting_name(model: str | None) -> str:
    """The model's name or absolute path, valid in any working folder."""
    from edgeinfer.registry.registry import find_model

    found = find_model(model)
    return str(Path(found.path).absolute()) if found.source == "path" else found.name
