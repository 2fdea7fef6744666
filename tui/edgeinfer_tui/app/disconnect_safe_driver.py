"""A Textual driver for terminals that may be closed while the program draws on them."""

import os
import selectors
from codecs import getincrementaldecoder
from contextlib import suppress
from typing import IO, Any

from textual._xterm_parser import XTermParser
from textual.drivers.linux_driver import LinuxDriver

STDOUT, STDERR = 1, 2
KEYS_BYTES = 4096
KEYS_SECONDS = 0.1
"""Seconds to wait for more bytes after an escape before it counts as the Esc key."""


class TerminalFile:
    """The terminal's file; output that can no longer be written is dropped.

    Textual writes on a thread. An error would end that thread, and the program would wait for it for ever.
    """

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def write(self, text: str) -> int:
        try:
            self._file.write(text)
        except OSError as error:
            self._drop(error)
        return len(text)

    def flush(self) -> None:
        try:
            self._file.flush()
        except OSError as error:
            self._drop(error)

    def _drop(self, error: OSError) -> None:
        """Redirect buffered and later output to the null device; otherwise Python exits with an error."""
        if isinstance(error, BlockingIOError):  # the terminal is slow, not closed
            return
        own = self._file.fileno()
        gone, nowhere = os.fstat(own).st_rdev, os.open(os.devnull, os.O_WRONLY)
        for number in {own, STDOUT, STDERR}:
            with suppress(OSError):  # a file descriptor that was never open
                if os.fstat(number).st_rdev == gone:
                    os.dup2(nowhere, number)
        os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class DisconnectSafeDriver(LinuxDriver):
    """As its parent, but the program exits normally when the terminal has been closed."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._file: Any = TerminalFile(self._file)

    def run_input_thread(self) -> None:
        """Read keys until the program ends or the terminal closes. A byte that isn't UTF-8 becomes a
        replacement character. Textual's decoder would end this thread instead, and keys would no longer work.
        """
        parser = XTermParser(self._debug)
        decode = getincrementaldecoder("utf-8")("replace").decode
        with selectors.SelectSelector() as selector:
            selector.register(self.fileno, selectors.EVENT_READ)
            while not self.exit_event.is_set():
                text = ""
                if selector.select(KEYS_SECONDS):
                    data = os.read(self.fileno, KEYS_BYTES)
                    if not data:  # the terminal is closed: select would report it as readable for ever
                        return
                    text = decode(data)
                for event in [*(parser.feed(text) if text else ()), *parser.tick()]:
                    self.process_message(event)
