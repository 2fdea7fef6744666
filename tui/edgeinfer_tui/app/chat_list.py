"""The saved chats at the side of the messages: opened, renamed, exported and deleted there."""

import asyncio
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static

from edgeinfer.errors import EdgeInferError, SettingError
from edgeinfer_tui.app.confirm_screen import ConfirmScreen
from edgeinfer_tui.app.picker_screen import ONE_LINE, KeyedList, PickerItem, saved_chats
from edgeinfer_tui.chat_session import ChatSession
from edgeinfer_tui.failures import one_line

if TYPE_CHECKING:
    from edgeinfer.history.records import StoredChat
    from edgeinfer_tui.app.chat_controller import ChatController

MIN_WIDTH = 120
"""Columns of a terminal that has room for the list."""
STORE_ERRORS = (EdgeInferError, OSError, sqlite3.Error)


class ChatOptions(KeyedList):
    """The chats, newest first."""

    KEYS: ClassVar[dict[str, str]] = {"r": "rename", "x": "export", "d": "delete"}

    def on_focus(self) -> None:
        if self.highlighted is None and self.option_count:
            self.highlighted = 0

    def hints(self) -> list[str]:
        """Descriptions of its keys, for the status line."""
        return ["Enter opens", *super().hints()]


class ChatActions(Static):
    """The actions on the highlighted chat, as words that can be clicked."""

    def on_mount(self) -> None:
        words = [
            Content.from_markup(f"[@click=ask('{what}')]\\[{what}][/]") for what in ChatOptions.KEYS.values()
        ]
        self.update(Content(" ").join(words))

    async def action_ask(self, what: str) -> None:
        chats = self.parent
        assert isinstance(chats, ChatList)
        if chats.options.highlighted is None:
            self.app.notify("no chat is selected; F8 goes to the list")
        else:
            await chats.run_action(what)


class ChatList(Vertical):
    """Shown if `is_open`, on terminals of `MIN_WIDTH` columns or more. `chat`: the chat of the screen."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(key, what, what) for key, what in ChatOptions.KEYS.items()),
        Binding("delete", "delete", "delete"),
    ]

    def __init__(self, chat: "ChatController") -> None:
        super().__init__(id="chats")
        self._chat = chat
        self._items: list[PickerItem[tuple[StoredChat, int | None]]] = []
        self.is_open = True
        self.options = ChatOptions(compact=True, markup=False)

    def compose(self) -> ComposeResult:
        yield Static(Content.styled("Chats", "bold underline"))
        yield self.options
        yield ChatActions(markup=False)

    def toggle(self) -> str | None:
        """Show the list and focus it, or hide it if it has the focus; returns why it can't be shown."""
        if self._chat.store is None:
            return "this chat is private: past chats can't be opened"
        if self.screen.size.width < MIN_WIDTH:
            return (
                f"the list of chats needs {MIN_WIDTH} columns, not {self.screen.size.width}; F3: past chats"
            )
        self.is_open = not (self.display and self.options.has_focus)
        self.fit()
        if self.is_open:
            self.options.focus()
        return None

    def fit(self) -> None:
        """Show or hide the list, by the width of the screen."""
        has_room = self.screen.size.width >= MIN_WIDTH
        self.display = self.is_open and has_room and self._chat.store is not None
        self.refresh_chats()

    def refresh_chats(self) -> None:
        """Read the chats again, if they are shown."""
        if self.display and self._chat.session.recorder is not None:
            self._read()

    @work(group="chats", exclusive=True)
    async def _read(self) -> None:
        store = self._chat.store
        assert store is not None
        try:
            self._items = list(await asyncio.to_thread(saved_chats(store), ""))
        except STORE_ERRORS as error:
            self._report(error)
            return
        highlighted, is_focused = self._selected(), self.options.has_focus
        shown = self._open_chat() if highlighted is None or not is_focused else highlighted.id
        numbers = [item.value[0].id for item in self._items]
        self.options.clear_options()
        self.options.add_options(
            [item.drawn("bold" if item.value[0].id == self._open_chat() else "") for item in self._items]
        )
        if shown in numbers:
            self.options.highlighted = numbers.index(shown)
        elif numbers and is_focused:
            self.options.highlighted = 0

    def _open_chat(self) -> int | None:
        """The number of the chat on the screen; None: it isn't saved yet."""
        recorder = self._chat.session.recorder
        return None if recorder is None or recorder.stored is None else recorder.stored.id

    def _selected(self) -> "StoredChat | None":
        at = self.options.highlighted
        return None if at is None or at >= len(self._items) else self._items[at].value[0]

    async def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        event.stop()
        if stored := self._selected():
            self.run_worker(self._open(stored), group="model")

    async def _open(self, stored: "StoredChat") -> None:
        try:
            await self._chat.open_chat(stored)
        except STORE_ERRORS as error:
            self._report(error)
        self._chat.screen.input.focus()

    def action_rename(self) -> None:
        """Ask for a name of the highlighted chat."""
        stored, store = self._selected(), self._chat.store
        if stored is None or store is None:
            return

        def rename(name: str) -> None:
            renamed, recorder = store.rename(stored, name.strip()), self._chat.session.recorder
            if recorder is not None and stored.id == self._open_chat():
                recorder.stored = renamed

        self._ask(LineScreen(f"Name of: {stored.title}", stored.name or "", rename))

    def action_export(self) -> None:
        """Ask for a file, and write the highlighted chat to it."""
        stored, store = self._selected(), self._chat.store
        if stored is None or store is None:
            return

        def export(name: str) -> None:
            path = Path(name.strip()).expanduser()
            text = store.exported(stored, "jsonl" if path.suffix == ".jsonl" else "md")
            try:
                with path.open("x", encoding="utf-8") as file:
                    file.write(text)
            except FileExistsError:
                raise SettingError(f"{path}: exists already, wanted the name of a new file") from None
            self.app.call_from_thread(self.app.notify, f"written: {path}", markup=False)

        self._ask(
            LineScreen("Export to which file? .md: Markdown, .jsonl: JSON lines", file_name(stored), export)
        )

    def action_delete(self) -> None:
        """Delete the highlighted chat, once that is confirmed."""
        stored = self._selected()

        def take(confirmed: bool | None) -> None:
            if confirmed and stored is not None:
                self.run_worker(self._delete(stored), group="model")

        if stored is not None:
            self.app.push_screen(
                ConfirmScreen(f"Delete {stored.messages} messages? {stored.title}", "Delete", "Keep (Esc)"),
                take,
            )

    async def _delete(self, stored: "StoredChat") -> None:
        store = self._chat.store
        assert store is not None
        if stored.id == self._open_chat():
            await self._chat.take_up(ChatSession(system=self._chat.session.system), None)
        try:
            owner = await asyncio.to_thread(store.snapshot_owner, stored)
            self._chat.thread.discard_snapshot(owner)
            await asyncio.to_thread(store.delete, stored)
        except STORE_ERRORS as error:
            self._report(error)
        self.refresh_chats()

    def _ask(self, dialog: "LineScreen") -> None:
        def take(_: object) -> None:
            # Letters of the list are keys, so what is typed next belongs to the message.
            self._chat.screen.input.focus()
            self._chat.screen.refresh_lines()
            self.refresh_chats()

        self.app.push_screen(dialog, take)

    def _report(self, error: Exception) -> None:
        self.app.notify(one_line(error), severity="error", markup=False, timeout=10)


def file_name(stored: "StoredChat") -> str:
    """A file name from the chat's name or the words of its title."""
    words = re.findall(r"\w+", stored.name or stored.title)
    return f"{'-'.join(words)[:40].strip('-').lower() or stored.label}.md"


class LineScreen(ModalScreen[bool]):
    """A line to edit. `apply` gets it on a worker thread; if that fails, the error is shown in the dialog."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape", "dismiss(False)", "back")]

    def __init__(self, heading: str, text: str, apply: Callable[[str], None]) -> None:
        super().__init__()
        self._heading, self._text, self._apply = heading.translate(ONE_LINE), text, apply

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static(self._heading, classes="heading", markup=False)
            yield Input(self._text, compact=True)
            yield Static("", id="wrong", markup=False)
            yield Static("Enter saves it, Esc goes back", classes="hint", markup=False)

    def on_mount(self) -> None:
        self.query_one(Input).focus()

    async def on_input_submitted(self, event: Input.Submitted) -> None:
        self.run_worker(self._submit(event.value), exclusive=True)

    async def _submit(self, text: str) -> None:
        try:
            await asyncio.to_thread(self._apply, text)
        except STORE_ERRORS as error:
            self.query_one("#wrong", Static).update(Content(one_line(error)))
        else:
            self.dismiss(True)
