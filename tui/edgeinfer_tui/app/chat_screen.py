"""The chat screen with its commands: by key, by click, or by a slash command."""

import asyncio
import time
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol, cast

from textual import events
from textual.binding import Binding, BindingType
from typer import BadParameter

from edgeinfer.errors import EdgeInferError
from edgeinfer.history.tree import ChatTree, Turn, newest_end
from edgeinfer_tui.app.chat_commands import COMMANDS, bindings
from edgeinfer_tui.app.choice_screen import PickerScreen, models_here, past_chats
from edgeinfer_tui.app.dialogue import Dialogue
from edgeinfer_tui.app.help_screen import HelpScreen
from edgeinfer_tui.app.memory_panel import MemoryPanel
from edgeinfer_tui.app.message_input import MessageInput
from edgeinfer_tui.app.settings_screen import ChosenSettings, SettingsScreen
from edgeinfer_tui.app.talk_screen import TalkScreen
from edgeinfer_tui.app.turn_view import MessageView
from edgeinfer_tui.command_words import common_beginning, completions, no_such_command
from edgeinfer_tui.failures import one_line
from edgeinfer_tui.options.completion import models_here as model_names
from edgeinfer_tui.output.status_line import status_line
from edgeinfer_tui.text_files import text_of

if TYPE_CHECKING:
    from edgeinfer.history.records import StoredChat

TWICE_SECONDS = 2.0
COMPLETED = {"/model": model_names}
"""Slash command -> function that completes its argument."""
SMALL_HEIGHT, NARROW_WIDTH = 16, 80


class ChatProgram(Protocol):
    """The methods of the application that this screen calls."""

    def leave(self) -> None: ...

    def switch_theme(self) -> None: ...


class ChatScreen(TalkScreen):
    """The chat screen with the user's commands."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *bindings(),
        Binding("escape", "back", "stop, back"),
        Binding("ctrl+c", "interrupt", "stop", priority=True),
        Binding("ctrl+up", "go(-1)", "message", priority=True),
        Binding("ctrl+down", "go(1)", "message", priority=True),
        Binding("pageup", "scroll_turns(-1)", "scroll", priority=True),
        Binding("pagedown", "scroll_turns(1)", "scroll", priority=True),
        Binding("tab", "go(-1)", "message"),
        Binding("shift+tab", "write", "write", priority=True),
    ]

    def __init__(self, *given: object) -> None:
        super().__init__(*given)  # type: ignore[arg-type]
        self._interrupted = 0.0
        self._told = ""
        """Argument of the slash command."""

    @property
    def program(self) -> ChatProgram:
        return cast(ChatProgram, self.app)

    def on_resize(self, event: events.Resize) -> None:
        self.set_class(event.size.height < SMALL_HEIGHT, "small")
        self.set_class(event.size.width < NARROW_WIDTH, "narrow")

    async def on_message_input_submitted(self, event: MessageInput.Submitted) -> None:
        word, _, rest = event.text.strip().partition(" ")
        if word.startswith("/") and "\n" not in event.text and "/" not in word[1:]:
            command = next((command for command in COMMANDS if command.word == word), None)
            self.input.clear()
            if command is None:
                words = [command.word for command in COMMANDS]
                self.notify(no_such_command(word, words), severity="error", markup=False)
                return
            self._told = rest.strip()
            try:
                await self.run_action(command.action)
            finally:
                self._told = ""
        elif await self.send(event.text):
            self.input.clear()

    async def on_message_input_left(self, event: MessageInput.Left) -> None:
        if event.key == "up":
            await self.action_go(-1)
        else:
            self.action_leave()

    async def on_message_view_asked(self, event: MessageView.Asked) -> None:
        view, turn = event.view, event.view.turn
        if event.what in ("back", "on"):
            await self._step(turn, -1 if event.what == "back" else 1)
        elif event.what == "copy":
            self.app.copy_to_clipboard(view.said())
            self.notify("copied", timeout=2)
        elif event.what == "edit":
            self._edit(turn if turn.role == "user" else turn.parent)
        elif event.what == "again":
            self._again(turn)

    def action_back(self) -> None:
        self.app.clear_notifications()
        if self.stop():
            return
        if self.editing is not None:
            self.editing = None
            self.input.clear()
            self.refresh_lines()
        self.input.focus()

    def action_interrupt(self) -> None:
        if selected := self.get_selected_text():
            self.app.copy_to_clipboard(selected)
            self.clear_selection()
            self.notify("copied", timeout=2)
            return
        if self.stop():
            return
        now = time.monotonic()
        if now - self._interrupted < TWICE_SECONDS:
            self.action_leave()
        self._interrupted = now
        self.notify("Ctrl-C once more leaves", timeout=TWICE_SECONDS)

    def action_leave(self) -> None:
        self.program.leave()

    def action_help(self) -> None:
        self.app.push_screen(HelpScreen())

    def action_settings(self) -> None:
        def take(chosen: ChosenSettings | None) -> None:
            if chosen is not None:
                self.settings = chosen.answering
                self.set_system(chosen.system)

        self.app.push_screen(SettingsScreen(self.dialogue.system, self.settings), take)

    def action_system(self) -> None:
        if self._told:
            self.set_system(self._told)
            self.notify("from the next answer on")
        else:
            self.action_settings()

    def action_schema(self) -> None:
        """Constrain completions to the JSON schema in a file, or remove the constraint."""
        told, before = self._told, "schema" in self.settings or "grammar" in self.settings
        if not told:
            kept = "answers keep to a form; /schema off ends that" if before else "answers keep to no form"
            self.notify(f"{kept}; /schema FILE: to the JSON schema in the file", markup=False)
            return
        settings = {name: value for name, value in self.settings.items() if name not in ("schema", "grammar")}
        if told != "off":
            from edgeinfer.structured.grammars import json_schema

            try:
                settings["schema"] = text_of(Path(told).expanduser(), "/schema")
                json_schema(settings["schema"])
            except (EdgeInferError, OSError, BadParameter) as error:
                self.notify(_reason(error), severity="error", markup=False)
                return
        self.settings = settings
        self.notify("from the next answer on", timeout=2)
        self.refresh_lines()

    def action_models(self) -> None:
        def take(name: str | None) -> None:
            if name is not None:
                self.run_worker(self.load(name), group="model", exclusive=True)

        if self.thread.loading is not None:
            self.notify("the model is still being loaded")
        elif self._told:
            take(self._told)
        else:
            model = self.thread.model
            in_use = "" if model is None else model.name
            self.app.push_screen(PickerScreen("Go on with which model?", models_here(in_use)), take)

    def action_search(self) -> None:
        def take(found: "tuple[StoredChat, int | None] | None") -> None:
            if found is not None:
                self.run_worker(self._open_found(*found), group="model")

        if self.keeping is None:
            self.notify("this chat is private: past chats stay closed")
        else:
            self.app.push_screen(PickerScreen("Past chats", past_chats(self.keeping), self._told), take)

    async def _open_found(self, stored: "StoredChat", at: int | None) -> None:
        await self.open_chat(stored, at)
        turn = self.dialogue.tree.with_number(at)
        view = None if turn is None else self.transcript.view_of(turn)
        if view is not None:
            self.transcript.release_anchor()
            self.transcript.scroll_to_widget(view, animate=False)
        self.input.focus()

    def action_edit_last(self) -> None:
        asked = next((turn for turn in reversed(self.dialogue.line) if turn.role == "user"), None)
        if asked is None:
            self.notify("nothing has been said yet that could be changed")
            return
        self._edit(asked)
        if self._told:
            self.input.text = self._told
            self.input.send()

    def action_theme(self) -> None:
        self.program.switch_theme()

    def action_scroll_turns(self, way: int) -> None:
        if way < 0:
            self.transcript.release_anchor()
            self.transcript.scroll_page_up(animate=False)
        else:
            self.transcript.scroll_page_down(animate=False)

    def action_write(self) -> None:
        self.input.focus()

    async def complete(self, line: str) -> str:
        """The line that Tab completes `line` to; several possible completions are listed."""
        commands = {command.word: COMPLETED.get(command.word) for command in COMMANDS}
        found = await asyncio.to_thread(completions, line, commands)
        if len(found) > 1:
            self.notify("  ".join(one.split(" ", 1)[-1] or one for one in found), markup=False, timeout=5)
        return common_beginning(found) or line

    def on_message_view_typed(self, event: MessageView.Typed) -> None:
        self.input.focus()
        self.input.insert(event.character)

    def on_descendant_focus(self) -> None:
        self.refresh_lines()

    async def action_go(self, step: int) -> None:
        """Focus the previous or the next message; from the input to the last message, and back."""
        views = self.transcript.views()
        at = self.focused
        if not isinstance(at, MessageView):
            if step < 0 and views:
                self.set_focus(views[-1])
            return
        place = views.index(at) + step
        if place < 0 and await self.transcript.show_earlier():
            views = self.transcript.views()
            place = views.index(at) + step
        if place >= len(views):
            self.set_focus(self.input)
        elif place >= 0:
            self.set_focus(views[place])

    def action_memory(self) -> None:
        panel = self.query_one(MemoryPanel)
        panel.display = not panel.display
        self.set_class(panel.display, "memory")

    def action_regenerate(self) -> None:
        if self.dialogue.tip is None:
            self.notify("nothing has been said yet that could be answered again")
        else:
            self._again(self.dialogue.tip)

    def action_copy_last(self) -> None:
        views = self.transcript.views()
        if views:
            views[-1].ask("copy")

    def action_stats(self) -> None:
        model = self.thread.model
        if self.latest is None or model is None:
            self.notify("no answer yet")
        else:
            self.notify(status_line(self.latest, model.context), markup=False, timeout=15)

    async def action_new_chat(self) -> None:
        await self.take_up(Dialogue(ChatTree(), system=self.dialogue.system), None)
        self.input.focus()

    async def _step(self, turn: Turn, step: int) -> None:
        """Switch to the branch of another alternative and continue the chat there."""
        if self.running is not None:
            self.notify("an answer is coming; Esc stops it")
            return
        dialogue = self.dialogue
        other = dialogue.tree.beside(turn, step)
        if other is None:
            return
        dialogue.tip = newest_end(other)
        await self.transcript.follow(dialogue.tree, dialogue.line)
        if view := self.transcript.view_of(other):
            view.focus()
        recorder = dialogue.recorder
        if recorder is not None:
            self.thread.do(lambda: recorder.leave_at(other))
        self.refresh_lines()

    def _again(self, turn: Turn) -> None:
        asked = turn if turn.role == "user" else turn.parent
        if asked is not None:
            self.answer_again(asked)
            self.input.focus()

    def _edit(self, asked: Turn | None) -> None:
        """Put a sent message back into the input for editing."""
        if asked is not None:
            self.editing = asked
            self.input.text = asked.text
            self.input.move_cursor(self.input.document.end)
            self.input.focus()
            self.refresh_lines()


def _reason(error: Exception) -> str:
    return error.message if isinstance(error, BadParameter) else one_line(error)
