"""Which kept chat a `run` goes on with, and the conversation that comes of it."""

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
    """The store, and the chat to go on with; `stored` None: one that is still to begin."""

    store: "ChatStore"
    stored: "StoredChat | None"
    name: str | None = None
    recorder: "Recorder | None" = None
    """Of the conversation, once it has begun."""

    @property
    def snapshot_owner(self) -> str | None:
        """With what a snapshot of the chat is deleted; None: the chat isn't in the store."""
        return None if self.recorder is None else self.recorder.snapshot_owner

    @property
    def model(self) -> str | None:
        """The model of the chat that goes on."""
        return None if self.stored is None else self.stored.model

    def conversation(self, loaded: LoadedModel, wishes: RunOptions) -> Conversation:
        """The model's conversation, with what was said before in it."""
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
        """What to say of the chat that goes on; None: it is a new one."""
        if self.stored is None:
            return None
        ago = shown_ago(time.time() - self.stored.changed)
        return f"going on with chat {self.stored.label}: {self.stored.title} ({ago})"


def open_session(wishes: RunOptions, prompted: bool, tell: Callable[[str], None] = say) -> ChatSession | None:
    """The chat that a command line asks for; None: nothing is kept. `prompted`: there is a prompt to answer,
    which is kept in a chat that is named only. `tell` hears why a chat that has no name can't be kept.

    Raises:
        ChatStoreError: there is none to go on with, none can have that name, or the store can't be opened.
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
    """What the model is called, from whatever folder it will be asked for."""
    from edgeinfer.registry.registry import find_model

    found = find_model(model)
    return str(Path(found.path).absolute()) if found.source == "path" else found.name
