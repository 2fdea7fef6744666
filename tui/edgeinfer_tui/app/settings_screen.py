"""Screen to view and change the system prompt and the sampling parameters."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import Button, Input, Label, Static, TextArea

from edgeinfer.errors import SettingError
from edgeinfer.options.run_options import run_options
from edgeinfer_tui.options.command_options import command_options

FIELDS = ("temperature", "top_k", "top_p", "min_p", "repeat_penalty", "max_tokens", "seed")
"""Options that the screen shows."""


@dataclass(frozen=True)
class SavedSettings:
    """The values when the screen was closed."""

    system: str | None
    generation: dict[str, Any]


def read_fields(texts: dict[str, str], before: dict[str, Any]) -> dict[str, Any]:
    """The settings as entered; an empty field resets a setting.

    Raises:
        SettingError: not a number, or out of range.
    """
    settings = {name: value for name, value in before.items() if name not in FIELDS}
    for name, text in texts.items():
        kind = command_options("chat")[name].hint
        if text.strip():
            try:
                settings[name] = kind(text)
            except ValueError:
                expected = "a whole number" if kind is int else "a number"
                raise SettingError(f"{name}: saw {text!r}, wanted {expected}") from None
    run_options(settings)
    return settings


class SettingsScreen(ModalScreen[SavedSettings | None]):
    """Returns the new settings, or None if they are unchanged."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape", "dismiss(None)", "back"),
        Binding("ctrl+s", "save", "save", priority=True),
    ]

    def __init__(
        self, system: str | None, generation: dict[str, Any], defaults: Mapping[str, Any] | None = None
    ) -> None:
        """`defaults`: those of the model, shown in empty fields."""
        super().__init__()
        self._system, self._before, self._defaults = system, generation, defaults or {}

    def compose(self) -> ComposeResult:
        with VerticalScroll(classes="dialog"):
            yield Static("Settings, from the next response on", classes="heading", markup=False)
            yield Label("System prompt")
            system = TextArea(self._system or "", compact=True, tab_behavior="focus", id="system")
            system.placeholder = "nothing"
            yield system
            for name in FIELDS:
                value = self._before.get(name)
                with Horizontal(classes="field"):
                    yield Label(name.replace("_", " "))
                    yield Input(
                        "" if value is None else str(value),
                        placeholder=str(
                            self._defaults.get(name, command_options("chat")[name].shown_default)
                        ),
                        compact=True,
                        id=name,
                    )
            yield Static("", id="wrong", markup=False)
            with Horizontal(classes="buttons"):
                yield Button("Save (Ctrl-S)", variant="primary", compact=True, id="save")
                yield Button("Back (Esc)", compact=True, id="back")

    def on_mount(self) -> None:
        self.query_one("#system").focus()

    def on_input_submitted(self) -> None:
        self.action_save()

    async def on_button_pressed(self, event: Button.Pressed) -> None:
        if event.button.id == "save":
            self.action_save()
        else:
            self.dismiss(None)

    def action_save(self) -> None:
        """Close the screen with the new settings; an invalid one is reported and the screen stays open."""
        texts = {name: self.query_one(f"#{name}", Input).value for name in FIELDS}
        try:
            generation = read_fields(texts, self._before)
        except SettingError as error:
            wrong = self.query_one("#wrong", Static)
            wrong.update(str(error))
            wrong.scroll_visible()
            return
        self.dismiss(SavedSettings(self.query_one("#system", TextArea).text.strip() or None, generation))
