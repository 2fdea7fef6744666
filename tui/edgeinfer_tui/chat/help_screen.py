"""The keys and the commands, on a page of their own."""

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from edgeinfer_tui.chat.chat_commands import COMMANDS, OTHER_KEYS, key_names

PLACE = """Chats are kept as they go; `edgeinfer chats` lists them on the command line, \
`edgeinfer chat --continue` goes on with the last one."""


class HelpScreen(ModalScreen[None]):
    """Ends with Esc, or with the key that brought it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,f1,q,enter", "dismiss(None)", "back"),
        Binding("down,j", "scroll(1)", "down", priority=True),
        Binding("up,k", "scroll(-1)", "up", priority=True),
    ]

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog"):
            yield Static("Help", classes="heading", markup=False)
            yield Static(help_text(), markup=False)
            yield Static("Esc goes back", classes="hint", markup=False)

    def action_scroll(self, step: int) -> None:
        self.query_one(VerticalScroll).scroll_relative(y=step, animate=False)


def help_text() -> Content:
    """Each key or command in a line of its own, what it does indented under it where it is long."""
    lines = [Content.styled("Commands, and their keys", "bold")]
    for command in COMMANDS:
        name = f"{command.word} {command.takes}".strip()
        lines.append(_line(f"{name:<16}{key_names(command.keys)}", command.meaning, 34))
    lines += [Content(""), Content.styled("Other keys", "bold")]
    lines += [_line(key, meaning, 34) for key, meaning in OTHER_KEYS]
    lines += [Content(""), Content(PLACE)]
    return Content("\n").join(lines)


def _line(key: str, meaning: str, column: int) -> Content:
    return Content.assemble(Content.styled(f"{key:<{column}}", "bold"), f" {meaning}")
