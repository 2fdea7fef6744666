"""Prints a completion: text to stdout as it is generated, everything else to stderr."""

import sys
from typing import TYPE_CHECKING, TextIO

from edgeinfer_tui.library import Stream
from edgeinfer_tui.output.progress_line import ProgressLine
from edgeinfer_tui.output.word_wrap import WordWrap

if TYPE_CHECKING:
    from edgeinfer.results import Generation


def print_text(text: str, out: TextIO | None = None) -> None:
    """Print a complete text, and a newline if it doesn't end in one."""
    out = out or sys.stdout
    WordWrap(out).write(text if text.endswith("\n") else f"{text}\n")


def print_completion(
    stream: Stream, progress: ProgressLine, out: TextIO | None = None, column: int = 0
) -> "Generation":
    """Print tokens as they are generated and a newline after the last; return the completion with its
    timings.

    Ctrl-C ends generation and keeps the text: its `finish_reason` is then "cancelled". `column`: column of
    the terminal's cursor.
    """
    out = out or sys.stdout
    wrap = WordWrap(out, column)
    open_line = False
    try:
        for token in stream:
            progress.erase()
            if token.text:
                wrap.write(token.text)
                open_line = not token.text.endswith("\n")
    except KeyboardInterrupt:
        stream.cancel()
        # The terminal has written ^C on this line.
        open_line = open_line or out.isatty()
    finally:
        progress.erase()
    if open_line:
        out.write("\n")
        out.flush()
    return stream.result
