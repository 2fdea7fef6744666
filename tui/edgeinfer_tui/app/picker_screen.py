"""A list to pick from, filtered by the text in a line above it: models or saved chats."""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Generic, TypeVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, OptionList, Static

from edgeinfer_tui.app.messages.message_view import MessageView
from edgeinfer_tui.chat_session import SessionStore
from edgeinfer_tui.output.columns import shown_bytes
from edgeinfer_tui.output.progress_line import shown_ago
from edgeinfer_tui.output.terminal_output import CONTROL_REPLACEMENTS

if TYPE_CHECKING:
    from edgeinfer.history.records import StoredChat

MAX_CHATS = 100
ONE_LINE = {**CONTROL_REPLACEMENTS, ord("\n"): " ", ord("\t"): " "}
Value = TypeVar("Value")


@dataclass(frozen=True)
class PickerItem(Generic[Value]):
    """A list item: its line, the line below it, and the value that it selects."""

    line: str
    detail: str
    value: Value

    def drawn(self, style: str = "") -> Content:
        """Both lines; `style`: of the first."""
        return Content.assemble(
            Content.styled(self.line.translate(ONE_LINE), style),
            Content.styled(f"\n  {self.detail.translate(ONE_LINE)}", "dim"),
        )


Find = Callable[[str], Sequence[PickerItem[Value]]]


class KeyedList(OptionList):
    """A list on the chat screen: characters that are not its keys are typed into the message input."""

    KEYS: ClassVar[dict[str, str]] = {}
    """Key -> its action on the highlighted item."""

    def hints(self) -> list[str]:
        """Descriptions of its keys, for the status line."""
        return [*(f"{key} {action}" for key, action in self.KEYS.items()), "Esc write"]

    def on_key(self, event: events.Key) -> None:
        if event.is_printable and event.character and event.character not in self.KEYS:
            event.stop()
            event.prevent_default()
            self.post_message(MessageView.Typed(event.character))


class PickerScreen(ModalScreen[Value | None]):
    """Returns the selected value, or None. `find` runs on a worker thread after each change of the filter
    text."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "back"),
        Binding("up", "move(-1)", "up", priority=True),
        Binding("down", "move(1)", "down", priority=True),
        Binding("pageup", "move(-8)", "up", priority=True),
        Binding("pagedown", "move(8)", "down", priority=True),
    ]

    def __init__(self, title: str, find: Find[Value], text: str = "") -> None:
        super().__init__()
        self._heading, self._find, self._first = title, find, text
        self._items: Sequence[PickerItem[Value]] = ()

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static(self._heading, classes="heading", markup=False)
            yield Input(self._first, placeholder="type to search", compact=True)
            yield OptionList(compact=True, markup=False)
            yield Static("Enter takes it, Esc goes back", classes="hint", markup=False)

    def on_mount(self) -> None:
        self.query_one(Input).focus()
        self._look(self._first)

    def on_input_changed(self, event: Input.Changed) -> None:
        self._look(event.value)

    def on_input_submitted(self) -> None:
        at = self.query_one(OptionList).highlighted
        if at is not None:
            self.dismiss(self._items[at].value)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        self.dismiss(self._items[event.option_index].value)

    def action_move(self, step: int) -> None:
        options = self.query_one(OptionList)
        if options.option_count:
            at = (options.highlighted or 0) + step
            options.highlighted = max(0, min(options.option_count - 1, at))

    def _look(self, text: str) -> None:
        self.run_worker(self._show(text), exclusive=True)

    async def _show(self, text: str) -> None:
        items = await asyncio.to_thread(self._find, text)
        options = self.query_one(OptionList)
        options.clear_options()
        self._items = items
        options.add_options([item.drawn() for item in items])
        if items:
            options.highlighted = 0


def models_here(loaded: str) -> Find[str]:
    """Find function over the models on disk; `loaded`: name of the model in use."""

    def find(text: str) -> list[PickerItem[str]]:
        from edgeinfer.registry.registry import list_models

        return [
            PickerItem(
                model.name + (" (in use)" if model.name == loaded else ""),
                f"{shown_bytes(model.size_bytes)}, {model.source}",
                str(model.path) if model.source == "path" else model.name,
            )
            for model in list_models()
            if text.casefold() in model.name.casefold()
        ]

    return find


def saved_chats(store: SessionStore) -> "Find[tuple[StoredChat, int | None]]":
    """Find function over saved chats: the most recent ones, or those with messages that match the filter
    text."""

    def find(text: str) -> "list[PickerItem[tuple[StoredChat, int | None]]]":
        now = time.time()
        if not text.strip():
            return [
                PickerItem(
                    f"{chat.name}: {chat.title}" if chat.name else chat.title,
                    f"{shown_ago(now - chat.changed)}, {chat.messages} messages, {chat.model}",
                    (chat, None),
                )
                for chat in store.chats(MAX_CHATS)
            ]
        return [
            PickerItem(
                match.excerpt,
                f"{shown_ago(now - match.message.created)}, {match.message.role}, in: {match.chat.title}",
                (match.chat, match.message.id),
            )
            for match in store.search(text.strip())
        ]

    return find
