"""The chat's commands, each started by a key or by a word that begins with a slash."""

from dataclasses import dataclass

from textual.binding import Binding


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
    ChatCommand("/model", "f4,ctrl+o", "models", "go on with another model", "[NAME]"),
    ChatCommand("/regen", "f5,ctrl+r", "regenerate", "answer the last message again"),
    ChatCommand("/memory", "f6,ctrl+g", "memory", "where the model's bytes lie"),
    ChatCommand("/theme", "f7,ctrl+t", "theme", "light or dark"),
    ChatCommand("/new", "ctrl+n", "new_chat", "begin a new chat; this one is kept"),
    ChatCommand("/edit", "", "edit_last", "change the last message and have it answered", "[TEXT]"),
    ChatCommand("/system", "", "system", "what the model is told first", "[TEXT]"),
    ChatCommand("/schema", "", "schema", "answer in JSON by a schema; off: as before", "[FILE]"),
    ChatCommand("/copy", "ctrl+y", "copy_last", "copy the last answer"),
    ChatCommand("/stats", "", "stats", "how fast the last answer came"),
    ChatCommand("/exit", "ctrl+q", "leave", "leave; Ctrl-D in an empty line does too"),
)
OTHER_KEYS = (
    ("Enter", "send"),
    ("Ctrl-J, Shift-Enter, Alt-Enter", "a new line in the message"),
    ("Esc", "stop the answer; leave a message that is being edited"),
    ("Ctrl-C", "stop the answer; twice, with no answer coming: leave"),
    ("Ctrl-U", "clear the message that is being written"),
    ("PageUp, PageDown", "scroll"),
    ("Tab", "complete a command, or the name of a model after /model"),
    ("Tab (empty line), Ctrl-Up", "go to a message; its keys, others are written:"),
    ("  Up, Down", "the one before, the next"),
    ("  Left, Right", "another answer, or another wording"),
    ("  e, r", "edit it; answer it again"),
    ("  c, 1 to 9", "copy it; copy its first to ninth block of code"),
    ("  t", "unfold what the model thought"),
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
