"""What the chat shows before the first message: the model, prompts to try, and the most useful keys."""

from typing import Any

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.content import Content
from textual.message import Message
from textual.widgets import Static

from edgeinfer_tui.app.chat_commands import COMMANDS, key_names
from edgeinfer_tui.app.model_status import where_it_runs
from edgeinfer_tui.app.picker_screen import KeyedList
from edgeinfer_tui.output.columns import one_line, shown_bytes

PROMPTS = (
    "What can you do?",
    "Tell me a short story about a fox.",
    "Explain in three sentences what a language model is.",
)
USEFUL = {
    "/help": "all keys and commands",
    "/search": "past chats",
    "/model": "another model",
    "/settings": "system prompt, temperature, ...",
    "/memory": "where the model's bytes are",
}
"""Commands that are shown, with their descriptions."""
COLUMN = 15
"""Column at which values and descriptions begin."""


class PromptList(KeyedList):
    """The prompts to try."""

    def on_focus(self) -> None:
        self.highlighted = 0

    def on_blur(self) -> None:
        self.highlighted = None

    def hints(self) -> list[str]:
        """Descriptions of its keys, for the status line."""
        return ["↑↓ prompts", "Enter takes one", "Esc write"]


class Welcome(VerticalScroll, can_focus=False):
    """Posts `PromptSelected` for a prompt that was clicked, or on which Enter was pressed."""

    class PromptSelected(Message):
        """A prompt to put into the input line."""

        def __init__(self, prompt: str) -> None:
            super().__init__()
            self.prompt = prompt

    def __init__(self) -> None:
        super().__init__(id="welcome")
        self._about = Static(markup=False)
        self.prompts = PromptList(*PROMPTS, compact=True, markup=False, id="prompts")
        self.prompts.highlighted = None

    def compose(self) -> ComposeResult:
        yield self._about
        yield Static(Content.styled("Try (Tab, or a click)", "bold"))
        yield self.prompts
        yield Static(key_lines())

    def show(self, name: str, size: int, context: int | None, plan: Any) -> None:
        """Describe the model: `size` in bytes, 0 if unknown; `context` None: it is being loaded; 0: it is
        unknown.
        """
        facts = {"Model": one_line(name, 56)}
        if size:
            facts["Size on disk"] = shown_bytes(size)
        facts["Runs on"] = "(loading ...)" if context is None else where_it_runs(plan)
        if context:
            facts["Context"] = f"{context:,} tokens"
        lines = [_line(what, value) for what, value in facts.items()]
        self._about.update(Content("\n").join([*lines, Content("")]))

    def on_option_list_option_selected(self, event: PromptList.OptionSelected) -> None:
        event.stop()
        self.post_message(self.PromptSelected(PROMPTS[event.option_index]))


def key_lines() -> Content:
    """The most useful keys, one a line."""
    first_keys = {command.word: key_names(command.keys.split(",")[0]) for command in COMMANDS}
    keys = [("Enter", "send")]
    keys += [(f"{first_keys[word]} {word}", meaning) for word, meaning in USEFUL.items()]
    keys.append(("@path", "the text of a file in a message"))
    return Content("\n").join(_line(key, meaning) for key, meaning in keys)


def _line(name: str, value: str) -> Content:
    return Content.assemble(Content.styled(f"{name:<{COLUMN}}", "bold"), value)
