"""Writes a streamed response to the store; each piece is safe once written, and a full disk loses none."""

import sqlite3
import time

from edgeinfer.history.records import State

RETRY_SECONDS = 1.0
"""Seconds to wait after a failed write before the next attempt."""


class MessageWriter:
    """Appends pieces to one message. Failed writes are kept in memory and retried with the next piece.

    `last_error`: error of the last write attempt; None: everything is saved.
    """

    def __init__(
        self, connection: sqlite3.Connection, message: int, retry_seconds: float = RETRY_SECONDS
    ) -> None:
        self._connection, self.message = connection, message
        self._retry_seconds = retry_seconds
        # The next piece and its number in one value, so that Ctrl-C can't separate them.
        self._unwritten = (0, "")
        self._replaces = False
        """Whether the next piece replaces all earlier ones."""
        self._not_before = 0.0
        self.last_error: str | None = None

    def add(self, text: str) -> None:
        """Append a piece and write it at once; a later crash of this program doesn't lose it."""
        number, unwritten = self._unwritten
        self._unwritten = number, unwritten + storable(text)
        if time.monotonic() >= self._not_before:
            self._attempt(None)

    def replace(self, text: str) -> None:
        """Write the whole text again, instead of the pieces so far."""
        self._unwritten, self._replaces = (0, storable(text)), True
        self._attempt(None)

    def finish(self, state: State = "whole") -> str | None:
        """Write the remaining text and the final state; returns `last_error`."""
        self._attempt(state)
        return self.last_error

    def _attempt(self, state: State | None) -> None:
        number, text = self._unwritten
        try:
            with self._connection:
                if self._replaces:
                    self._connection.execute("DELETE FROM pieces WHERE turn = ?", (self.message,))
                if text:  # Already written if Ctrl-C came between the write and the update of `_unwritten`.
                    self._connection.execute(
                        "INSERT OR REPLACE INTO pieces VALUES (?, ?, ?)", (self.message, number, text)
                    )
                if state is not None:
                    self._close(state)
        except sqlite3.Error as error:
            self.last_error = str(error)
            self._not_before = time.monotonic() + self._retry_seconds
            return
        self._unwritten, self._replaces = (number + 1, ""), False
        self.last_error = None

    def _close(self, state: State) -> None:
        """Merge the pieces into the message's text."""
        pieces = self._connection.execute(
            "SELECT text FROM pieces WHERE turn = ? ORDER BY number", (self.message,)
        ).fetchall()
        self._connection.execute(
            "UPDATE turns SET text = text || ?, state = ? WHERE id = ?",
            ("".join(text for (text,) in pieces), state, self.message),
        )
        self._connection.execute("DELETE FROM pieces WHERE turn = ?", (self.message,))


def storable(text: str) -> str:
    """The text with invalid Unicode replaced: a terminal may pass part of a surrogate pair."""
    return text.encode("utf-8", "replace").decode("utf-8")
