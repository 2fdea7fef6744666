"""An answer on its way to the terminal: text to stdout as it comes, everything else to stderr."""

import sys
from typing import TYPE_CHECKING, TextIO

from edgeinfer_tui.library import Stream
from edgeinfer_tui.progress_line import ProgressLine

if TYPE_CHECKING:
    from edgeinfer.results import Generation

# A model must not steer the terminal: all control characters but tab and newline, shown as a mark.
HARMLESS = {code: "�" for code in [*range(0x20), *range(0x7F, 0xA0)] if chr(code) not in "\t\n"}


def print_text(text: str, out: TextIO | None = None) -> None:
    """Print a whole answer, and a newline behind it unless it ends in one."""
    out = out or sys.stdout
    out.write(text.translate(HARMLESS) if out.isatty() else text)
    if not text.endswith("\n"):
        out.write("\n")
    out.flush()


def print_answer(stream: Stream, progress: ProgressLine, out: TextIO | None = None) -> "Generation":
    """Print tokens as they come and a newline behind the last; return the answer with its speed.

    Ctrl-C ends the answer and keeps what was said: its `finish_reason` is then "cancelled".
    """
    out = out or sys.stdout
    on_terminal = out.isatty()
    open_line = False
    try:
        for token in stream:
            progress.erase()
            if token.text:
                out.write(token.text.translate(HARMLESS) if on_terminal else token.text)
                out.flush()
                open_line = not token.text.endswith("\n")
    except KeyboardInterrupt:
        stream.cancel()
        # The terminal has written ^C there.
        open_line = open_line or on_terminal
    finally:
        progress.erase()
    if open_line:
        out.write("\n")
        out.flush()
    return stream.result
