"""Textual's driver for a terminal that may be closed while it is drawn on."""

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
"""How long a key is waited for before an escape counts as one of its own."""


class Screen:
    """The terminal's file; what can't be written any more is dropped.

    Textual writes on a thread, which an error would end; the program would then wait for it for ever.
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
        """Send what is left in buffers, and all that follows, nowhere: else Python ends with an error."""
        if isinstance(error, BlockingIOError):  # the terminal is there, and slow
            return
        own = self._file.fileno()
        gone, nowhere = os.fstat(own).st_rdev, os.open(os.devnull, os.O_WRONLY)
        for number in {own, STDOUT, STDERR}:
            with suppress(OSError):  # one that was never open
                if os.fstat(number).st_rdev == gone:
                    os.dup2(nowhere, number)
        os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


class DisconnectSafeDriver(LinuxDriver):
    """As its parent, and the program ends as usual when the terminal has gone."""

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._file: Any = Screen(self._file)

    def run_input_thread(self) -> None:
        """Read keys until the program or the terminal ends. A byte that isn't UTF-8 becomes a replacement
        character, where Textual's own decoder would end this thread, and with it the keyboard.
        """
        parser = XTermParser(self._debug)
        decode = getincrementaldecoder("utf-8")("replace").decode
        with selectors.SelectSelector() as selector:
            selector.register(self.fileno, selectors.EVENT_READ)
            while not self.exit_event.is_set():
                text = ""
                if selector.select(KEYS_SECONDS):
                    data = os.read(self.fileno, KEYS_BYTES)
                    if not data:  # the terminal is closed, and would be ready for ever
                        return
                    text = decode(data)
                for event in [*(parser.feed(text) if text else ()), *parser.tick()]:
                    self.process_message(event)
