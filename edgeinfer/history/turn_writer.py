"""An answer on its way into the store: each piece is safe once it is there, and a full disk loses none."""

import sqlite3
import time

from edgeinfer.history.records import State

RETRY_SECONDS = 1.0
"""How long a store that can't be written is left alone before the next attempt."""


class MessageWriter:
    """Appends pieces of one turn. What can't be written is kept in memory and tried again with the next.

    `trouble`: why the store couldn't be written at the last attempt; None: all that came is safe.
    """

    def __init__(
        self, connection: sqlite3.Connection, turn: int, retry_seconds: float = RETRY_SECONDS
    ) -> None:
        self._connection, self.turn = connection, turn
        self._retry_seconds = retry_seconds
        # The next piece, with its number: one value, so that Ctrl-C at any moment finds them together.
        self._unwritten = (0, "")
        self._not_before = 0.0
        self.trouble: str | None = None

    def add(self, text: str) -> None:
        """One more piece, written at once; a crash of this program from now on doesn't lose it."""
        number, unwritten = self._unwritten
        self._unwritten = number, unwritten + storable(text)
        if time.monotonic() >= self._not_before:
            self._attempt(None)

    def finish(self, state: State = "whole") -> str | None:
        """Write what is left and how the turn ended; returns `trouble`."""
        self._attempt(state)
        return self.trouble

    def _attempt(self, state: State | None) -> None:
        number, text = self._unwritten
        try:
            with self._connection:
                if text:  # It is there already where Ctrl-C came between writing it and remembering that.
                    self._connection.execute(
                        "INSERT OR REPLACE INTO pieces VALUES (?, ?, ?)", (self.turn, number, text)
                    )
                if state is not None:
                    self._close(state)
        except sqlite3.Error as error:
            self.trouble = str(error)
            self._not_before = time.monotonic() + self._retry_seconds
            return
        self._unwritten = number + 1, ""
        self.trouble = None

    def _close(self, state: State) -> None:
        """The pieces become the turn's text."""
        pieces = self._connection.execute(
            "SELECT text FROM pieces WHERE turn = ? ORDER BY number", (self.turn,)
        ).fetchall()
        self._connection.execute(
            "UPDATE turns SET text = text || ?, state = ? WHERE id = ?",
            ("".join(text for (text,) in pieces), state, self.turn),
        )
        self._connection.execute("DELETE FROM pieces WHERE turn = ?", (self.turn,))


def storable(text: str) -> str:
    """The text, with a mark in place of what isn't Unicode: a terminal may hand over half a character."""
    return text.encode("utf-8", "replace").decode("utf-8")
