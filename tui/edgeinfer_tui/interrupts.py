"""What Ctrl-C does: before there is anything to keep, the program ends; later it is an exception."""

import os
import signal
from types import FrameType

INTERRUPTED = 128 + 2
"""What a shell reports for a program that SIGINT ended."""


def end_program() -> None:
    """From now on Ctrl-C ends the program at once and without a word.

    An exception would not do: raised in the middle of an import it is at times printed and forgotten.
    A program that was started with the signal ignored, as in the background, goes on ignoring it.
    """
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _end_program)


def raise_exception() -> None:
    """From now on Ctrl-C raises KeyboardInterrupt, so that an answer can be kept."""
    if signal.getsignal(signal.SIGINT) is _end_program:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end_program(number: int, frame: FrameType | None) -> None:
    if os.isatty(2):
        # Off the line on which the terminal has written ^C.
        os.write(2, b"\n")
    os._exit(INTERRUPTED)
