"""The help screen: keys and commands."""

import textwrap
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from edgeinfer_tui.app.chat_commands import COMMANDS, OTHER_KEYS, key_names

COLUMN = 35
"""Column at which descriptions begin, if the screen is wide enough."""
NARROW, INDENT = 60, 4
"""Below this width in columns, the description is on the next line, with this indent."""
PLACE = """Chats are kept as they go; `edgeinfer chats` lists them on the command line, \
`edgeinfer chat --continue` goes on with the last one."""


class HelpScreen(ModalScreen[None]):
    """Closed by Esc, or by the key that opened it."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,f1,q,enter", "dismiss(None)", "back"),
        Binding("down,j", "scroll(1)", "down", priority=True),
        Binding("up,k", "scroll(-1)", "up", priority=True),
    ]

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog"):
            yield Static("Help", classes="heading", markup=False)
            yield HelpText(markup=False)
            yield Static("Esc goes back", classes="hint", markup=False)

    def action_scroll(self, step: int) -> None:
        self.query_one(VerticalScroll).scroll_relative(y=step, animate=False)


class HelpText(Static):
    """The lines of the help screen, wrapped to its width."""

    def on_resize(self, event: events.Resize) -> None:
        self.update(help_text(event.size.width))


def help_text(width: int) -> Content:
    """Each key or command with its description: in two columns, or one below the other on narrow screens."""
    lines = [Content.styled("Commands, and their keys", "bold")]
    for command in COMMANDS:
        name = f"{command.word} {command.takes}".strip()
        lines.append(_line(f"{name:<16}{key_names(command.keys)}", command.meaning, width))
    lines += [Content(""), Content.styled("Other keys", "bold")]
    lines += [_line(key, meaning, width) for key, meaning in OTHER_KEYS]
    lines += [Content(""), Content(PLACE)]
    return Content("\n").join(lines)


def _line(key: str, meaning: str, width: int) -> Content:
    narrow = width < NARROW
    indent = INDENT if narrow else COLUMN
    broken = textwrap.wrap(meaning, max(10, width - indent))
    head = key.rstrip() if narrow else f"{key:<{COLUMN}}{broken.pop(0)}"
    rest = [head[COLUMN:], *(" " * indent + text for text in broken)]
    return Content.assemble(Content.styled(head[:COLUMN], "bold"), "\n".join(rest))
