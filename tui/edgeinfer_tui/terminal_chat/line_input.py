"""Reads a message from the terminal: history, line editing, multi-line input."""

import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType

from edgeinfer_tui.system.terminal_calls import is_posix_terminal

PROMPT = ">>> "
CONTINUED = "... "
FENCE = '"""'
MAX_REMEMBERED = 1000
MIN_COLUMNS = 20
"""Minimum terminal columns for readline, which divides by zero if the prompt hardly fits."""

readline: ModuleType | None
try:
    import readline
except ImportError:
    # Windows has no readline: its console edits lines, and remembers those of this session.
    readline = None


class LineInput:
    """Reads messages; with readline, they are saved in `history_file` (None: not saved).

    A message ends with its line, unless the line ends in a backslash or the message starts with three double
    quotes; then it ends at the next three.
    """

    def __init__(
        self,
        history_file: Path | None,
        read_line: Callable[[str], str] | None = None,
        complete: Callable[[str], Sequence[str]] | None = None,
    ) -> None:
        """`complete`: possible completions of a line on Tab."""
        self._history_file = history_file
        self._read_line = read_line or read_terminal_line
        self._complete = complete
        self.can_prefill = readline is not None

    def load_history(self) -> str | None:
        """Load earlier messages; returns the error, or None."""
        if readline is None:
            return "no readline on this machine: no history and no editing" if is_posix_terminal() else None
        self._bind_keys()
        if self._history_file is None:
            return None
        try:
            if self._history_file.exists():
                readline.read_history_file(str(self._history_file))
        except OSError as error:
            return f"{self._history_file}: {error.strerror}; starting without history"
        return None

    def save_history(self) -> str | None:
        """Save the last messages; returns the error, or None."""
        if readline is None or self._history_file is None:
            return None
        try:
            self._history_file.parent.mkdir(parents=True, exist_ok=True)
            readline.set_history_length(MAX_REMEMBERED)
            readline.write_history_file(str(self._history_file))
        except OSError as error:
            return f"{self._history_file}: {error.strerror}; the history is not saved"
        return None

    def _bind_keys(self) -> None:
        """Tab completes, Ctrl-U clears the whole line."""
        assert readline is not None
        if "libedit" in (readline.__doc__ or ""):
            readline.parse_and_bind("bind ^U vi-kill-line-prev")
            readline.parse_and_bind("bind ^I rl_complete")
        else:
            # Otherwise the terminal's editing keys take precedence.
            readline.parse_and_bind("set bind-tty-special-chars off")
            readline.parse_and_bind(r'"\C-u": kill-whole-line')
            readline.parse_and_bind("tab: complete")
        readline.set_completer_delims("")
        readline.set_completer(self._completion)

    def _completion(self, line: str, index: int) -> str | None:
        completions = self._complete(line) if self._complete else []
        return completions[index] if index < len(completions) else None

    def read(self, prefill: str = "") -> str:
        """Read one message; `prefill`: initial text of the line for editing.

        Raises:
            EOFError: Ctrl-D on an empty message.
            KeyboardInterrupt: Ctrl-C.
        """
        line = self._first_line(prefill)
        if line.lstrip().startswith(FENCE):
            return self._fenced(line.lstrip().removeprefix(FENCE))
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(self._read_line(CONTINUED))
        return "\n".join(lines)

    def _first_line(self, prefill: str) -> str:
        if not prefill or readline is None:
            return self._read_line(PROMPT)
        # readline edits one line; a multi-line text is joined into one.
        readline.set_startup_hook(lambda: readline.insert_text(prefill.replace("\n", " ")))
        try:
            return self._read_line(PROMPT)
        finally:
            readline.set_startup_hook()

    def _fenced(self, remainder: str) -> str:
        lines = [remainder]
        with contextlib.suppress(EOFError):
            while not lines[-1].rstrip().endswith(FENCE):
                lines.append(self._read_line(CONTINUED))
        lines[-1] = lines[-1].rstrip().removesuffix(FENCE)
        return "\n".join(lines).strip("\n")


def read_terminal_line(prompt: str) -> str:
    """A line from the terminal, with readline's editing unless the terminal is too narrow for it.

    Raises:
        EOFError: Ctrl-D.
    """
    if _columns() >= MIN_COLUMNS:
        return input(prompt)
    print(prompt, end="", flush=True)
    line = sys.stdin.readline()
    if not line:
        raise EOFError
    return line.removesuffix("\n")


def _columns() -> int:
    """Columns of the terminal; a large number if unknown."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or MIN_COLUMNS
    except (OSError, ValueError, AttributeError):
        return MIN_COLUMNS
