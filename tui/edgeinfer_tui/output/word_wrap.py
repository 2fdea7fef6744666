"""Word wrap for streamed text: a word that reaches the right edge moves to the next line."""

import os
from typing import TextIO

from edgeinfer_tui.output.terminal_output import control

MIN_COLUMNS = 20
"""Narrower terminals break within words, because few words would fit a line."""
MOVE_BACK = "\x1b[{count}D\x1b[K"


class WordWrap:
    """Writes streamed text to a terminal; other output is unchanged.

    A word is shown as it is streamed. If it reaches the edge, it is erased and written on the next line.
    """

    def __init__(self, out: TextIO, column: int = 0) -> None:
        """`column`: column of the cursor, from 0."""
        self._out = out
        self._columns = _columns_of(out)
        self.column = column
        self._word = ""
        """The characters since the last blank, if they are all on this line."""
        self._word_width = 0

    def write(self, text: str) -> None:
        """Write a piece of text and flush."""
        if self._columns < MIN_COLUMNS:
            self._out.write(text)
        else:
            for mark in text:
                self._add(mark)
        self._out.flush()

    def _add(self, mark: str) -> None:
        if mark == "\n":
            self._columns = _columns_of(self._out) or self._columns
            self._break_line()
            return
        width = 8 - self.column % 8 if mark == "\t" else _width(mark)
        blank = mark in " \t"
        if self.column + width > self._columns:
            if blank:
                self._break_line()
                return
            self._move_word()
        self._out.write(mark)
        self.column += width
        self._word = "" if blank else self._word + mark
        self._word_width = 0 if blank else self._word_width + width

    def _move_word(self) -> None:
        word, width = self._word, self._word_width
        if 0 < width < self.column:
            control(self._out, MOVE_BACK.format(count=width))
            self._break_line()
            self._out.write(word)
            self.column, self._word, self._word_width = width, word, width
        else:
            self._break_line()

    def _break_line(self) -> None:
        self._out.write("\n")
        self.column, self._word, self._word_width = 0, "", 0


def _width(text: str) -> int:
    """Width of a text on a terminal, in columns."""
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def _columns_of(out: TextIO) -> int:
    """Usable columns: all but the last, because terminals differ in when they wrap; 0: no terminal."""
    if not out.isatty():
        return 0
    try:
        return os.get_terminal_size(out.fileno()).columns - 1
    except (OSError, ValueError):
        return 0
