"""The chat screen with its commands: by key, by click, or by a slash command."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar, Protocol, cast

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Static

from edgeinfer.history.tree import ChatMessage, user_message_of
from edgeinfer_tui.app.chat_commands import COMMANDS, HelpScreen, bindings
from edgeinfer_tui.app.chat_controller import ChatController
from edgeinfer_tui.app.chat_list import ChatList
from edgeinfer_tui.app.message_input import MessageInput
from edgeinfer_tui.app.messages.message_view import MessageView
from edgeinfer_tui.app.messages.transcript import Transcript
from edgeinfer_tui.app.model_status import MemoryPanel, StatusBar
from edgeinfer_tui.app.picker_screen import KeyedList, PickerScreen, models_here, saved_chats
from edgeinfer_tui.app.settings_screen import SavedSettings, SettingsScreen
from edgeinfer_tui.app.welcome import Welcome
from edgeinfer_tui.chat_session import ChatSession, SessionStore
from edgeinfer_tui.command_words import ALIASES, common_beginning, completions, unknown_command_message
from edgeinfer_tui.options.arguments import models_here as model_names
from edgeinfer_tui.options.arguments import models_to_pull
from edgeinfer_tui.options.parsed_options import ParsedOptions
from edgeinfer_tui.output.status_line import status_line
from edgeinfer_tui.output.terminal_output import CONTROL_REPLACEMENTS

if TYPE_CHECKING:
    from edgeinfer.history.records import StoredChat

DOUBLE_PRESS_SECONDS = 2.0
COMPLETED = {"/model": model_names, "/pull": models_to_pull}
"""Slash command -> function that completes its argument."""
SMALL_HEIGHT, NARROW_WIDTH = 16, 80
PAINTED_SECONDS = 1.0


class ChatProgram(Protocol):
    """The methods of the application that this screen calls."""

    def leave(self) -> None: ...

    def switch_theme(self) -> None: ...


class ChatScreen(Screen[None]):
    """The chat screen with the user's commands; `chat` runs the chat."""

    BINDINGS: ClassVar[list[BindingType]] = [
        *bindings(),
        Binding("escape", "back", "stop, back"),
        Binding("ctrl+c", "interrupt", "stop", priority=True),
        Binding("ctrl+up", "go(-1)", "message", priority=True),
        Binding("ctrl+down", "go(1)", "message", priority=True),
        Binding("pageup", "scroll_messages(-1)", "scroll", priority=True),
        Binding("pagedown", "scroll_messages(1)", "scroll", priority=True),
        Binding("tab", "go(-1)", "message"),
        Binding("shift+tab", "write", "write", priority=True),
    ]

    def __init__(
        self,
        options: ParsedOptions,
        store: SessionStore | None,
        fails: Callable[[Exception], None],
        warnings: Sequence[str] = (),
    ) -> None:
        """As for `ChatController`."""
        super().__init__()
        self.chat = ChatController(self, options, store, fails, warnings)
        self._interrupted = 0.0
        self._argument = ""
        """Argument of the slash command."""

    def compose(self) -> ComposeResult:
        yield Static(id="title", markup=False)
        with Horizontal(id="body"):
            yield ChatList(self.chat)
            with Vertical(id="chat"):
                with Horizontal(id="middle"):
                    yield Welcome()
                    yield Transcript()
                    yield MemoryPanel()
                yield Static(id="note", markup=False)
                yield MessageInput(self.complete)
        yield StatusBar()

    @property
    def transcript(self) -> Transcript:
        return self.query_one(Transcript)

    @property
    def input(self) -> MessageInput:
        return self.query_one(MessageInput)

    def on_mount(self) -> None:
        self.input.focus()
        self.run_worker(self.chat.start(), group="model")

    @property
    def program(self) -> ChatProgram:
        return cast(ChatProgram, self.app)

    def on_resize(self, event: events.Resize) -> None:
        self.set_class(event.size.height < SMALL_HEIGHT, "small")
        self.set_class(event.size.width < NARROW_WIDTH, "narrow")
        self.query_one(ChatList).fit()

    async def on_message_input_submitted(self, event: MessageInput.Submitted) -> None:
        word, _, argument = event.text.strip().partition(" ")
        if word.startswith("/") and "\n" not in event.text and "/" not in word[1:]:
            command = next((one for one in COMMANDS if one.word == ALIASES.get(word, word)), None)
            self.input.clear()
            if command is None:
                words = [command.word for command in COMMANDS]
                self.notify(unknown_command_message(word, words), severity="error", markup=False)
                return
            self._argument = argument.strip()
            try:
                await self.run_action(command.action)
            finally:
                self._argument = ""
        elif await self.chat.send(event.text):
            self.input.clear()

    async def on_message_input_exited(self, event: MessageInput.Exited) -> None:
        if event.key == "up":
            await self.action_go(-1)
        else:
            self.action_leave()

    async def on_message_view_action_requested(self, event: MessageView.ActionRequested) -> None:
        view, message = event.view, event.view.message
        if event.what in ("back", "on"):
            await self.chat.show_alternative(message, -1 if event.what == "back" else 1)
        elif event.what == "copy":
            self.app.copy_to_clipboard(view.response_text())
            self.notify("copied", timeout=2)
        elif event.what == "edit":
            self._edit(user_message_of(message))
        elif event.what == "again":
            self._again(message)

    def action_back(self) -> None:
        self.app.clear_notifications()
        if self.chat.stop():
            return
        if self.chat.editing is not None:
            self.chat.editing = None
            self.input.clear()
            self.refresh_lines()
        self.input.focus()

    def action_interrupt(self) -> None:
        if selected := self.get_selected_text():
            self.app.copy_to_clipboard(selected)
            self.clear_selection()
            self.notify("copied", timeout=2)
            return
        if self.chat.stop():
            return
        now = time.monotonic()
        if now - self._interrupted < DOUBLE_PRESS_SECONDS:
            self.action_leave()
        self._interrupted = now
        self.notify("Ctrl-C once more leaves", timeout=DOUBLE_PRESS_SECONDS)

    def action_leave(self) -> None:
        self.program.leave()

    def action_help(self) -> None:
        self.app.push_screen(HelpScreen())

    def action_settings(self) -> None:
        def take(selected: SavedSettings | None) -> None:
            if selected is not None:
                self.chat.settings = selected.generation
                self.chat.set_system(selected.system)

        model = self.chat.thread.model
        defaults = model.sampling if model else None
        self.app.push_screen(SettingsScreen(self.chat.session.system, self.chat.settings, defaults), take)

    def action_system(self) -> None:
        if self._argument:
            self.chat.set_system(self._argument)
            self.notify("from the next response on")
        else:
            self.action_settings()

    def action_schema(self) -> None:
        """Constrain completions to the JSON schema in a file, or remove the constraint."""
        self.chat.schema_command(self._argument)
        self.refresh_lines()

    def action_models(self) -> None:
        def take(name: str | None) -> None:
            if name is not None:
                self.chat.pulls.switch(name)

        if self.chat.thread.loading is not None:
            self.notify("the model is still being loaded")
        elif self._argument:
            take(self._argument)
        else:
            model = self.chat.thread.model
            in_use = "" if model is None else model.name
            self.app.push_screen(PickerScreen("Continue with which model?", models_here(in_use)), take)

    def action_pull(self) -> None:
        if self._argument:
            self.chat.pulls.pull(self._argument)
        elif not self.chat.pulls.stop():
            self.notify("/pull NAME downloads a model; `edgeinfer list --all` lists them", markup=False)

    def action_search(self) -> None:
        def take(selection: "tuple[StoredChat, int | None] | None") -> None:
            if selection is not None:
                self.run_worker(self._open_found(*selection), group="model")

        if self.chat.store is None:
            self.notify("this chat is private: past chats can't be opened")
        else:
            self.app.push_screen(
                PickerScreen("Past chats", saved_chats(self.chat.store), self._argument), take
            )

    async def _open_found(self, stored: "StoredChat", at: int | None) -> None:
        await self.chat.open_chat(stored, at)
        message = self.chat.session.tree.with_number(at)
        view = None if message is None else self.transcript.view_of(message)
        if view is not None:
            self.transcript.release_anchor()
            self.transcript.scroll_to_widget(view, animate=False)
        self.input.focus()

    def action_edit_last(self) -> None:
        user_message = self.chat.session.last_user_message
        if user_message is None:
            self.notify("no message yet to edit")
            return
        self._edit(user_message)
        if self._argument:
            self.input.text = self._argument
            self.input.send()

    def action_theme(self) -> None:
        self.program.switch_theme()

    def action_scroll_messages(self, way: int) -> None:
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
        lines = await asyncio.to_thread(completions, line, commands)
        if len(lines) > 1:
            self.notify("  ".join(one.split(" ", 1)[-1] or one for one in lines), markup=False, timeout=5)
        return common_beginning(lines) or line

    def on_message_view_typed(self, event: MessageView.Typed) -> None:
        self.input.focus()
        self.input.insert(event.character)

    def on_welcome_prompt_selected(self, event: Welcome.PromptSelected) -> None:
        self.input.text = event.prompt
        self.input.move_cursor(self.input.document.end)
        self.input.focus()

    def on_descendant_focus(self) -> None:
        self.refresh_lines()

    async def action_go(self, step: int) -> None:
        """Focus the previous or the next message; from the input to the last message, and back."""
        views = self.transcript.views()
        at = self.focused
        if not isinstance(at, MessageView):
            prompts = self.query_one(Welcome).prompts
            if step < 0:
                self.set_focus(views[-1] if views else self.input if prompts.has_focus else prompts)
            return
        index = views.index(at) + step
        if index < 0 and await self.transcript.show_earlier():
            views = self.transcript.views()
            index = views.index(at) + step
        if index >= len(views):
            self.set_focus(self.input)
        elif index >= 0:
            self.set_focus(views[index])

    def action_memory(self) -> None:
        panel = self.query_one(MemoryPanel)
        panel.display = not panel.display
        self.set_class(panel.display, "memory")

    def action_sidebar(self) -> None:
        if problem := self.query_one(ChatList).toggle():
            self.notify(problem, markup=False)
        elif not self.query_one(ChatList).is_open:
            self.input.focus()

    def refresh_chats(self) -> None:
        """Update the list of chats at the side."""
        self.query_one(ChatList).refresh_chats()

    def action_regenerate(self) -> None:
        if self.chat.session.tip is None:
            self.notify("no message yet to respond to again")
        else:
            self._again(self.chat.session.tip)

    def action_copy_last(self) -> None:
        views = self.transcript.views()
        if views:
            views[-1].ask("copy")

    def action_stats(self) -> None:
        model = self.chat.thread.model
        if self.chat.latest is None or model is None:
            self.notify("no response yet")
        else:
            self.notify(status_line(self.chat.latest, model.context), markup=False, timeout=15)

    async def action_new_chat(self) -> None:
        await self.chat.take_up(ChatSession(system=self.chat.session.system), None)
        self.input.focus()

    def _again(self, message: ChatMessage) -> None:
        before = message.parent if message.role == "assistant" else message
        if before is not None:
            self.chat.respond_again(before)
            self.input.focus()

    def _edit(self, user_message: ChatMessage | None) -> None:
        """Put a sent message back into the input for editing."""
        if user_message is not None:
            self.chat.editing = user_message
            self.input.text = user_message.text
            self.input.move_cursor(self.input.document.end)
            self.input.focus()
            self.refresh_lines()

    def refresh_lines(self) -> None:
        """Update the lines above and below the messages."""
        model = self.chat.thread.model
        title = self.chat.session.title or "a new chat"
        name = "" if model is None else f"  ·  {model.name}"
        self.query_one("#title", Static).update(Content(f"{title}{name}".translate(CONTROL_REPLACEMENTS)))
        note = self.chat.note()
        line = self.query_one("#note", Static)
        line.display = bool(note)
        line.update(Content(note))
        latest = self.chat.running.latest if self.chat.running is not None else self.chat.latest
        bar = self.query_one(StatusBar)
        self.set_class(not self.chat.session.line, "empty")
        if isinstance(self.focused, MessageView | KeyedList):
            bar.show_keys(self.focused.hints())
        else:
            bar.show(latest, None if model is None else model.context, self.hints())

    def hints(self) -> list[str]:
        """Commands available now, for the status line."""
        forms = {"schema": "JSON by a schema", "grammar": "by a grammar"}
        formed = [text for name, text in forms.items() if name in self.chat.settings]
        return [*formed, "Esc stops" if self.chat.running is not None else "F1 help"]

    async def drawn(self) -> None:
        """Wait until changes are drawn."""
        drawn = asyncio.Event()
        self.call_after_refresh(drawn.set)
        with suppress(TimeoutError):
            await asyncio.wait_for(drawn.wait(), PAINTED_SECONDS)
