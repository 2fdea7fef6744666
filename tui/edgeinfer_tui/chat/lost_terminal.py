"""Textual's driver for a terminal that may be closed while it is drawn on."""

from contextlib import suppress
from typing import IO, Any

from textual.drivers.linux_driver import LinuxDriver


class Screen:
    """The terminal's file; what can't be written any more is dropped.

    Textual writes on a thread, which an error would end; the program would then wait for it for ever.
    """

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, text: str) -> int:
        with suppress(OSError):
            self._file.write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._file.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class LosableTerminal(LinuxDriver):
    """As its parent, and the program ends as usual when the terminal has gone."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._file: Any = Screen(self._file)
