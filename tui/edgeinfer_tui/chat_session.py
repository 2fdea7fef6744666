"""A chat in progress and the saved chats, for the line chat and for the Textual chat."""

import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from edgeinfer_tui.failures import say
from edgeinfer_tui.library import Conversation, Stream
from edgeinfer_tui.options.parsed_options import ParsedOptions, regeneration_options
from edgeinfer_tui.output.progress_line import shown_ago

if TYPE_CHECKING:
    from edgeinfer.history.recorder import Recorder
    from edgeinfer.history.records import SearchHit, State, StoredChat
    from edgeinfer.history.store import ChatStore
    from edgeinfer.history.tool_messages import Results
    from edgeinfer.history.tree import ChatMessage, ChatTree
    from edgeinfer.results import Generation, Token


class ChatSession:
    """Message tree, current branch and system prompt of a chat. `recorder` None: it is not saved."""

    def __init__(
        self,
        tree: "ChatTree | None" = None,
        tip: "ChatMessage | None" = None,
        recorder: "Recorder | None" = None,
        system: str | None = None,
    ) -> None:
        from edgeinfer.history.tree import ChatTree

        self.tree = ChatTree() if tree is None else tree
        self.tip, self.recorder, self.system = tip, recorder, system
        self._reported: str | None = None

    @property
    def line(self) -> "list[ChatMessage]":
        """Messages of the current branch."""
        from edgeinfer.history.tree import branch_to

        return branch_to(self.tip)

    @property
    def last_user_message(self) -> "ChatMessage | None":
        """The last message of the user on the current branch."""
        return next((one for one in reversed(self.line) if one.role == "user"), None)

    @property
    def title(self) -> str:
        """Name of the chat, or the beginning of its first message; "" if it is empty."""
        from edgeinfer.history.records import title_of

        stored = None if self.recorder is None else self.recorder.stored
        if stored is not None and stored.name:
            return stored.name
        first = self.line[:1]
        return title_of(first[0].text) if first else ""

    def say(self, text: str, instead_of: "ChatMessage | None" = None) -> "ChatMessage":
        """Append a message, or add it as an alternative of `instead_of`; returns its empty response."""
        before = self.tip if instead_of is None else instead_of.parent
        return self.add_response(self.tree.add(before, "user", text))

    def add_response(self, user_message: "ChatMessage") -> "ChatMessage":
        """Add another response to a message, empty at first, and continue the chat there."""
        self.tip = self.tree.add(user_message, "assistant", "", "coming")
        return self.tip

    def stream(
        self,
        chat: Conversation,
        text: str,
        options: Mapping[str, Any],
        instead_of: "ChatMessage | None" = None,
    ) -> Stream:
        """Stream and record the response to a message, added as by `say`."""
        before, tip = (self.tip if instead_of is None else instead_of.parent), self.tip
        stream = start_response(chat, before, text, self.system, options)
        return _RecordedStream(stream, self, self.say(text, instead_of), tip)

    def regenerate(
        self, chat: Conversation, user_message: "ChatMessage", options: Mapping[str, Any]
    ) -> Stream:
        """Stream and record another response to a message; the seed is increased by one for each."""
        options, tip = regeneration_options(options, len(user_message.children)), self.tip
        stream = start_response(chat, user_message.parent, user_message.text, self.system, options)
        return _RecordedStream(stream, self, self.add_response(user_message), tip)

    @property
    def snapshot_owner(self) -> str | None:
        """Owner whose deletion also deletes the chat's prompt cache; None: the chat isn't in the store."""
        return None if self.recorder is None else self.recorder.snapshot_owner

    def add_results(self, response: "ChatMessage", results: "Results") -> "ChatMessage":
        """Add the results of a response's tool calls, and another response, which is returned, empty."""
        from edgeinfer.history.tool_messages import text_of_results

        return self.add_response(self.tree.add(response, "tool", text_of_results(results)))

    def set_system(self, text: str | None) -> None:
        """Set and record the system prompt, from the next response on."""
        self.system = text
        if self.recorder is not None:
            self.recorder.set_system(text)

    def new_error(self) -> str | None:
        """A message if the recorder fails for a reason that wasn't reported yet."""
        last_error = None if self.recorder is None else self.recorder.last_error
        is_new, self._reported = last_error != self._reported, last_error
        return f"this part of the chat isn't on the disk: {last_error}" if last_error and is_new else None


def start_response(
    chat: Conversation,
    before: "ChatMessage | None",
    text: str,
    system: str | None,
    options: Mapping[str, Any],
) -> Stream:
    """Start the response to `text` after the branch that ends with `before`.

    The library's chat is brought to that branch; tokens that its KV cache holds aren't prefilled again.
    """
    from edgeinfer.history.tree import branch_to, model_messages

    messages: list[dict[str, Any]] = [*model_messages(branch_to(before))]
    chat.system = system
    if chat.messages[: len(messages)] != messages:
        chat.clear()
        chat.messages = messages
    if len(chat.messages) > len(messages):
        return chat.edit(sum(one["role"] == "user" for one in messages), text, **options)
    return chat.stream(text, **options)


def start_from_results(
    chat: Conversation, results: "ChatMessage", system: str | None, options: Mapping[str, Any]
) -> Stream:
    """Start the response to a message with results of tools, as `start_response`."""
    from edgeinfer.chat_templates.tool_calls import written_calls
    from edgeinfer.history.tool_messages import results_of
    from edgeinfer.history.tree import branch_to, model_messages

    assert results.parent is not None
    messages = model_messages(branch_to(results))
    chat.system = system
    if chat.messages != messages:
        chat.clear()
        chat.messages = messages
    chat.tool_calls = written_calls(results.parent.text).calls
    return chat.stream_results([content for _, content in results_of(results.text)], **options)


class _RecordedStream:
    """The stream of a response; its tokens are written to the store before they are shown."""

    def __init__(
        self, inner: Stream, session: ChatSession, response: "ChatMessage", tip: "ChatMessage | None"
    ) -> None:
        """`tip`: where the session goes back to if there is no response."""
        self._inner, self._session, self._response, self._tip = inner, session, response, tip
        self._recorder = session.recorder
        if self._recorder is not None:
            self._recorder.begin(response)

    def __iter__(self) -> "Iterator[Token]":
        try:
            for token in self._inner:
                if self._recorder is not None:
                    self._recorder.add(token.text)
                self._response.text += token.text
                yield token
        except Exception:
            self._finish("failed")
            raise
        self._finish("stopped" if self.result.finish_reason == "cancelled" else "whole")

    def cancel(self) -> None:
        self._inner.cancel()
        self._finish("stopped")

    @property
    def result(self) -> "Generation":
        return self._inner.result

    def _finish(self, state: "State") -> None:
        if self._response.state != "coming":
            return
        self._response.state = state
        if self._recorder is not None:
            self._recorder.finish(self._response, state)
        if not self._response.text and state != "whole":
            self._session.tip = self._tip


class SessionStore:
    """The saved chats. Writes happen on one thread, which calls `open` first; reads on any other.

    `stored`: the chat to continue, None: a new one. `name`: name for the first chat created.
    """

    def __init__(
        self, path: Path | None = None, name: str | None = None, stored: "StoredChat | None" = None
    ) -> None:
        self._path, self._name, self.stored = path, name, stored
        self._store: ChatStore | None = None

    def open(self) -> None:
        """Open the store for writing. Raises `ChatStoreError`."""
        from edgeinfer.history.store import ChatStore

        self._store = ChatStore(self._path)

    def close(self) -> None:
        """Close the store. Must be called on the thread that opened it."""
        if self._store is not None:
            self._store.close()

    def record(self, session: ChatSession, model: Callable[[], str], stored: "StoredChat | None") -> None:
        """Record a session from now on; `model` returns the model's name, called when recording begins."""
        from edgeinfer.history.recorder import Recorder

        store = self._store
        assert store is not None

        def begin() -> "StoredChat":
            name, self._name = self._name, None
            return store.new_chat(model(), session.system, name)

        session.recorder = Recorder(store, begin, stored)

    def session(self, stored: "StoredChat", at: int | None = None) -> ChatSession:
        """Load a saved chat on its current branch, or on the branch that contains message `at`."""
        from edgeinfer.history.store import ChatStore
        from edgeinfer.history.tree import ChatTree, newest_end

        with ChatStore(self._path) as store:
            stored = store.chat(str(stored.id))
            tree = ChatTree(store.messages(stored))
        tip = tree.with_number(stored.tip if at is None else at)
        return ChatSession(tree, tip and newest_end(tip), system=stored.system)

    def chats(self, limit: int) -> "list[StoredChat]":
        """The `limit` most recently changed chats."""
        from edgeinfer.history.store import ChatStore

        with ChatStore(self._path) as store:
            return store.chats(limit)

    def search(self, text: str) -> "list[SearchHit]":
        """Messages that contain a text."""
        from edgeinfer.history.store import ChatStore

        with ChatStore(self._path) as store:
            return store.search(text)

    def exported(self, stored: "StoredChat", form: Literal["md", "jsonl"]) -> str:
        """The current branch of a chat as Markdown or as JSON lines."""
        from edgeinfer.history.export import as_json_lines, as_markdown
        from edgeinfer.history.store import ChatStore

        with ChatStore(self._path) as store:
            stored = store.chat(str(stored.id))
            return (as_markdown if form == "md" else as_json_lines)(stored, store.branch(stored))

    def rename(self, stored: "StoredChat", name: str) -> "StoredChat":
        """Name a chat. Raises `ChatStoreError` if the name is taken or invalid."""
        from edgeinfer.history.store import ChatStore

        with ChatStore(self._path) as store:
            return store.rename(stored, name)

    def delete(self, stored: "StoredChat") -> None:
        """Delete a chat with its prompt cache. Raises `OSError` as `ChatStore.delete`."""
        from edgeinfer.history.store import ChatStore

        with ChatStore(self._path) as store:
            store.delete(stored)

    def snapshot_owner(self, stored: "StoredChat") -> str:
        """Owner id of a chat's prompt cache."""
        from edgeinfer.history.store import ChatStore

        with ChatStore(self._path) as store:
            return store.snapshot_owner(stored.id)

    def continuation_message(self) -> str | None:
        """Message about the chat that is continued; None: it is a new one."""
        if self.stored is None:
            return None
        ago = shown_ago(time.time() - self.stored.changed)
        return f"continuing chat {self.stored.label}: {self.stored.title} ({ago})"


def open_store(
    options: ParsedOptions, prompted: bool, tell: Callable[[str], None] = say
) -> SessionStore | None:
    """The store with the chat that the command line selects, closed; None: the chat is not saved.

    `prompted`: there is a prompt, which is saved only in a chat selected by name. `tell` is called with the
    reason if an unnamed chat can't be saved.

    Raises:
        ChatStoreError: no chat to continue, an invalid name, or the store can't be opened.
    """
    from edgeinfer.history.store import ChatStore, ChatStoreError, check_name

    named = options.resume or options.session is not None
    if options.private or (prompted and not named):
        return None
    try:
        store = ChatStore()
    except ChatStoreError as error:
        if named:
            raise
        tell(f"this chat won't be saved: {error}")
        return None
    with store:
        if options.resume:
            last = store.chats(1)
            if not last:
                raise ChatStoreError("--continue: there is no chat yet to continue")
            return SessionStore(store.path, stored=last[0])
        if options.session is not None and store.has(options.session):
            return SessionStore(store.path, stored=store.chat(options.session))
    if options.session is not None:
        check_name(options.session)
    return SessionStore(store.path, options.session)


def stored_model_name(model: str | None) -> str:
    """The model's name or absolute path, valid in any working folder."""
    from edgeinfer.registry.registry import find_model

    model_file = find_model(model)
    return str(Path(model_file.path).absolute()) if model_file.source == "path" else model_file.name
