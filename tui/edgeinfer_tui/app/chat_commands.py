"""The chat's commands, each started by a key or by a word that begins with a slash, and the help screen."""

import textwrap
from dataclasses import dataclass
from typing import ClassVar

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static


@dataclass(frozen=True)
class ChatCommand:
    """`keys`: Textual key names, comma-separated; `action`: action of the chat screen; `takes`: argument."""

    word: str
    keys: str
    action: str
    meaning: str
    takes: str = ""


COMMANDS = (
    ChatCommand("/help", "f1", "help", "this page"),
    ChatCommand("/settings", "f2", "settings", "system prompt and sampling settings"),
    ChatCommand("/search", "f3,ctrl+f", "search", "past chats: search, open", "[TEXT]"),
    ChatCommand("/model", "f4,ctrl+o", "models", "continue with another model", "[NAME]"),
    ChatCommand("/pull", "", "pull", "download a model; without a name: stop that", "[NAME]"),
    ChatCommand("/regen", "f5,ctrl+r", "regenerate", "generate another response to the last message"),
    ChatCommand("/memory", "f6,ctrl+g", "memory", "where the model's bytes are"),
    ChatCommand("/theme", "f7,ctrl+t", "theme", "light or dark"),
    ChatCommand("/list", "f8,ctrl+l", "sidebar", "the list of chats at the side: go there, hide it"),
    ChatCommand("/new", "ctrl+n", "new_chat", "begin a new chat; this one is saved"),
    ChatCommand("/edit", "", "edit_last", "edit the last message", "[TEXT]"),
    ChatCommand("/system", "", "system", "system prompt", "[TEXT]"),
    ChatCommand(
        "/schema", "", "schema", "constrain responses to a JSON schema; off: no constraint", "[FILE]"
    ),
    ChatCommand("/copy", "ctrl+y", "copy_last", "copy the last response"),
    ChatCommand("/stats", "", "stats", "speed of the last response"),
    ChatCommand("/exit", "ctrl+q", "leave", "leave; /bye and Ctrl-D in an empty line do too"),
)
OTHER_KEYS = (
    ("Enter", "send"),
    ("Ctrl-J, Shift-Enter, Alt-Enter", "a new line in the message"),
    ("Esc", "stop the response; leave a message that is being edited"),
    ("Ctrl-C", "stop the response; twice, with no response in progress: leave"),
    ("Ctrl-U", "clear the message that is being written"),
    ("PageUp, PageDown", "scroll"),
    ("Tab", "complete a command, or the name of a model after /model"),
    ("Tab (empty line), Ctrl-Up", "go to a message; its keys, others are written:"),
    ("  Up, Down", "the one before, the next"),
    ("  Left, Right", "another response, or another version of the message"),
    ("  e, r", "edit it; generate another response"),
    ("  c, 1 to 9", "copy it; copy its first to ninth block of code"),
    ("  t", "unfold the reasoning"),
    ("@path", "a file in a message; a file that is dropped on the terminal too"),
)


def bindings() -> list[Binding]:
    """Textual key bindings of the commands; they work wherever the focus is."""
    return [
        Binding(command.keys, command.action, command.meaning, priority=True)
        for command in COMMANDS
        if command.keys
    ]


def key_names(keys: str) -> str:
    """Key names in display form: f3,ctrl+f -> F3, Ctrl-F."""
    return ", ".join("-".join(part.capitalize() for part in key.split("+")) for key in keys.split(",") if key)


COLUMN = 35
"""Column at which descriptions begin, if the screen is wide enough."""
NARROW, INDENT = 60, 4
"""Below this width in columns, the description is on the next line, with this indent."""
STORAGE_HELP = """Chats are saved as they proceed; `edgeinfer history` lists them on the command line, \
`edgeinfer chat --continue` continues the last one."""


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
    lines += [Content(""), Content(STORAGE_HELP)]
    return Content("\n").join(lines)


def _line(key: str, meaning: str, width: int) -> Content:
    narrow = width < NARROW
    indent = INDENT if narrow else COLUMN
    broken = textwrap.wrap(meaning, max(10, width - indent))
    head = key.rstrip() if narrow else f"{key:<{COLUMN}}{broken.pop(0)}"
    remainder = [head[COLUMN:], *(" " * indent + text for text in broken)]
    return Content.assemble(Content.styled(head[:COLUMN], "bold"), "\n".join(remainder))
