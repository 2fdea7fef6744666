"""The question before a tool is called: its name, all arguments, and three buttons."""

import json
from typing import ClassVar, Literal

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Button, Static

from edgeinfer.chat_templates.tool_calls import ToolCall
from edgeinfer_tui.output.terminal_output import CONTROL_REPLACEMENTS

Answer = Literal["yes", "always", "no"]
LABELS: dict[Answer, str] = {"no": "Don't run (Esc)", "always": "Always run this tool", "yes": "Run"}
MAX_LINES = 14


class CallScreen(ModalScreen[Answer]):
    """Returns the answer; the focus is on the button that refuses."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss('no')", "back"),
        Binding("left,up", "app.focus_previous", "previous"),
        Binding("right,down", "app.focus_next", "next"),
    ]

    def __init__(self, call: ToolCall) -> None:
        super().__init__()
        self._call = call

    def compose(self) -> ComposeResult:
        values = json.dumps(self._call.arguments, ensure_ascii=False, indent=2)
        with Vertical(classes="dialog"):
            yield Static(Content(f"Run {self._call.name}?"), classes="heading", markup=False)
            with VerticalScroll(id="arguments") as area:
                area.styles.height = "auto"
                area.styles.max_height = MAX_LINES
                yield Static(Content(values.translate(CONTROL_REPLACEMENTS)), markup=False)
            with Horizontal(classes="buttons"):
                for answer, label in LABELS.items():
                    yield Button(label, compact=True, id=answer)

    def on_mount(self) -> None:
        self.query_one("#no").focus()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        answers: dict[str | None, Answer] = {answer: answer for answer in LABELS}
        self.dismiss(answers[event.button.id])
