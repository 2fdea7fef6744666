"""A question with two buttons."""

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.screen import ModalScreen
from textual.widgets import Button, Static

from edgeinfer_tui.app.picker_screen import ONE_LINE


class ConfirmScreen(ModalScreen[bool]):
    """Returns whether the button `yes` was pressed; `no` is focused first."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(False)", "back"),
        Binding("left,up", "app.focus_previous", "previous"),
        Binding("right,down", "app.focus_next", "next"),
    ]

    def __init__(self, question: str, yes: str, no: str) -> None:
        super().__init__()
        self._question, self._yes, self._no = question.translate(ONE_LINE), yes, no

    def compose(self) -> ComposeResult:
        with Vertical(classes="dialog"):
            yield Static(self._question, markup=False)
            with Horizontal(classes="buttons"):
                yield Button(self._no, compact=True, id="no")
                yield Button(self._yes, variant="error", compact=True, id="yes")

    def on_mount(self) -> None:
        self.query_one("#no").focus()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        self.dismiss(event.button.id == "yes")
