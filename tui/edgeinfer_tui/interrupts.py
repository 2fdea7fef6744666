"""Ctrl-C handling: during startup it ends the program; later it raises an exception."""

import os
import signal
from types import FrameType

INTERRUPTED = 128 + 2
"""The exit code that a shell reports for a program ended by SIGINT."""


def end_program() -> None:
    """From now on Ctrl-C ends the program at once, without a message.

    An exception raised during an import may be printed and then ignored, so none is used here. If the signal
    was ignored at start, as for background jobs, it stays ignored.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end_program)


def raise_exception() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt, so that a partial response can be kept."""
    if signal.getsignal(signal.SIGINT) is _end_program:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end_program(number: int, frame: FrameType | None) -> None:
    if os.isatty(2):
        # Leave the line on which the terminal has written ^C.
        os.write(2, b"\n")
    os._exit(INTERRUPTED)
