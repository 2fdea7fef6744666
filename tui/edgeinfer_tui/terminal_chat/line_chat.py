"""The line-based chat: `edgeinfer run` without a prompt."""

import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from edgeinfer_tui.chat_session import ChatSession
from edgeinfer_tui.command_words import ALIASES, completions, unknown_command_message
from edgeinfer_tui.failures import report
from edgeinfer_tui.library import LoadedModel, Stream
from edgeinfer_tui.output.completion_output import print_completion
from edgeinfer_tui.output.progress_line import ProgressLine
from edgeinfer_tui.output.status_line import context_lines, of_context, status_line
from edgeinfer_tui.system.terminal_calls import END_OF_INPUT_KEY
from edgeinfer_tui.terminal_chat.line_input import FENCE, LineInput

if TYPE_CHECKING:
    from edgeinfer.results import Generation

GREETING = "{name}{context}. /help lists the commands, {key} leaves."
COMMANDS = ("/help", "/system", "/regen", "/edit", "/clear", "/stats", "/exit")
STOPPED = "(stopped; the text so far is kept)"
HELP = {
    "/help": "this list",
    "/system [TEXT]": "show or set the system prompt",
    "/regen": "generate another response to the last message",
    "/edit [TEXT]": "edit the last message",
    "/clear": "clear the conversation",
    "/stats": "speed of the last response, context used",
    "/exit, /bye": f"leave (or {END_OF_INPUT_KEY})",
    f"{FENCE} ... {FENCE}": "a message of several lines; a \\ at the end of a line carries on too",
    "Tab": "complete a command",
    "Ctrl-U": "clear the line",
    "Ctrl-C": "stop the response and keep its text",
}


class LineChat:
    """A loop that reads messages and prints the responses of one conversation."""

    def __init__(
        self,
        model: LoadedModel,
        session: ChatSession,
        settings: dict[str, Any],
        lines: LineInput | None = None,
        show_speed: bool = False,
        private: bool = False,
    ) -> None:
        """`private`: the input history is not saved."""
        self._model = model
        self._chat = model.chat(system=session.system)
        self._session = session
        self._settings = settings
        self._lines = lines or _default_input(private)
        self._show_speed = show_speed
        self._last: Generation | None = None
        actions = (self._help, self._system, self._regen, self._edit, self._clear, self._stats, self._exit)
        self._commands: dict[str, Callable[[str], bool]] = dict(zip(COMMANDS, actions, strict=True))

    def run(self) -> None:
        """Read messages and respond until Ctrl-D or /exit."""
        _note(self._lines.load_history())
        context = f", context {self._model.context} tokens" if self._model.context else ""
        _note(GREETING.format(key=END_OF_INPUT_KEY, name=self._model.name, context=context))
        going = True
        while going:
            try:
                message = self._lines.read()
            except EOFError:
                print()
                break
            except KeyboardInterrupt:
                print()
                _note(f"({END_OF_INPUT_KEY} or /exit leaves)")
                continue
            going = self._take(message)
        _note(self._lines.save_history())

    def _take(self, message: str) -> bool:
        """Handle a command or a message; returns False to end the chat."""
        if not message.strip():
            return True
        word, _, argument = message.strip().partition(" ")
        if not word.startswith("/") or "\n" in message:
            self._respond(lambda settings: self._session.stream(self._chat, message, settings))
            return True
        command = self._commands.get(ALIASES.get(word, word))
        if command is None:
            _note(unknown_command_message(word, list(self._commands)))
            return True
        return command(argument.strip())

    def _respond(self, begin: Callable[[dict[str, Any]], Stream]) -> None:
        """Print a response; after a failure, one line is printed and the chat continues."""
        progress = ProgressLine("reading the prompt", sys.stderr)
        try:
            stream = begin({**self._settings, "progress": progress.update})
            self._last = print_completion(stream, progress)
        except BrokenPipeError:
            raise
        except Exception as error:
            report(error)
            _note(self._session.new_error())
            return
        except KeyboardInterrupt:
            print()
            _note("(stopped before the response)")
            return
        if self._last.finish_reason == "cancelled":
            _note(STOPPED)
        _note(self._session.new_error())
        for line in context_lines(self._last, self._model.context):
            _note(line)
        if self._show_speed:
            _note(status_line(self._last, self._model.context))

    def _help(self, _: str) -> bool:
        width = max(map(len, HELP))
        for name, meaning in HELP.items():
            _note(f"  {name:<{width}}  {meaning}")
        return True

    def _system(self, text: str) -> bool:
        if text:
            self._session.set_system(text)
            _note(self._session.new_error())
            _note("from the next response on")
        else:
            _note(self._session.system or "none; /system TEXT sets one")
        return True

    def _regen(self, _: str) -> bool:
        user_message = self._session.last_user_message
        if user_message is None:
            _note("no message yet to respond to again")
        else:
            self._respond(lambda settings: self._session.regenerate(self._chat, user_message, settings))
        return True

    def _edit(self, text: str) -> bool:
        """Edit the last message; without `text`, it is put back into the input line."""
        last = self._session.last_user_message
        if last is None:
            _note("no message yet to edit")
            return True
        if not text and not self._lines.can_prefill:
            _note("this machine has no readline: write the new message after /edit")
            return True
        try:
            text = text or self._lines.read(prefill=last.text)
        except (EOFError, KeyboardInterrupt):
            print()
            return True
        if text.strip():
            self._respond(lambda settings: self._session.stream(self._chat, text, settings, last))
        return True

    def _clear(self, _: str) -> bool:
        self._session.tip = None
        self._chat.clear()
        self._last = None
        _note("cleared")
        return True

    def _stats(self, _: str) -> bool:
        if self._last is not None:
            _note(status_line(self._last, self._model.context))
        messages = sum(one.role == "user" for one in self._session.line)
        _note(
            f"{messages} {'message' if messages == 1 else 'messages'} from you, "
            f"context {self._chat.context_used}{of_context(self._model.context)} tokens"
        )
        return True

    def _exit(self, _: str) -> bool:
        return False


def _default_input(private: bool) -> LineInput:
    from edgeinfer.user_folders import user_folder

    history = None if private else user_folder("state") / "history"
    return LineInput(history, complete=lambda line: completions(line, dict.fromkeys(COMMANDS)))


def _note(line: str | None) -> None:
    """Print a message of the program on stderr, so that stdout contains only the conversation."""
    if line is not None:
        print(line, file=sys.stderr)
