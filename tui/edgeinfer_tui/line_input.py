"""Reading a message from the terminal: history, line editing, several lines."""

import contextlib
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

PROMPT = ">>> "
CONTINUED = "... "
FENCE = '"""'
MOST_REMEMBERED = 1000

readline: ModuleType | None
try:
    import readline
except ImportError:
    # Windows has none; input() works without, only history and editing are missing.
    readline = None


class LineInput:
    """Reads messages; remembers them in `history_file` where the platform has a readline.

    A message ends with its line, unless the line ends in a backslash or the message opened with three
    double quotes, which then close it.
    """

    def __init__(self, history_file: Path, read_line: Callable[[str], str] = input) -> None:
        self._history_file = history_file
        self._read_line = read_line
        self.can_prefill = readline is not None

    def load_history(self) -> str | None:
        """Bring back earlier messages; returns what stood in the way, if anything did."""
        if readline is None:
            return "no readline on this machine: no history and no editing"
        try:
            if self._history_file.exists():
                readline.read_history_file(str(self._history_file))
        except OSError as error:
            return f"{self._history_file}: {error.strerror}; starting without history"
        return None

    def save_history(self) -> str | None:
        """Keep the last messages for the next time; returns what stood in the way, if anything did."""
        if readline is None:
            return None
        try:
            self._history_file.parent.mkdir(parents=True, exist_ok=True)
            readline.set_history_length(MOST_REMEMBERED)
            readline.write_history_file(str(self._history_file))
        except OSError as error:
            return f"{self._history_file}: {error.strerror}; the history is not kept"
        return None

    def read(self, prefill: str = "") -> str:
        """One message; `prefill` stands in the line for editing.

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
        # readline has one line to show; what stood on several becomes one again when it is sent.
        readline.set_startup_hook(lambda: readline.insert_text(prefill.replace("\n", " ")))
        try:
            return self._read_line(PROMPT)
        finally:
            readline.set_startup_hook()

    def _fenced(self, rest: str) -> str:
        lines = [rest]
        with contextlib.suppress(EOFError):
            while not lines[-1].rstrip().endswith(FENCE):
                lines.append(self._read_line(CONTINUED))
        lines[-1] = lines[-1].rstrip().removesuffix(FENCE)
        return "\n".join(lines).strip("\n")
