"""The chat store: one SQLite file; the messages of a chat form a tree, so that edits delete nothing."""

import hashlib
import os
import sqlite3
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from edgeinfer.history.damaged_store import ChatStoreError as ChatStoreError
from edgeinfer.history.damaged_store import CheckedConnection, check_store, decoded, is_damage, move_aside
from edgeinfer.history.message_writer import MessageWriter, storable
from edgeinfer.history.records import (
    Role,
    SearchHit,
    State,
    StoredChat,
    StoredMessage,
    stored_chat,
    stored_message,
)
from edgeinfer.snapshots.store import delete_snapshots
from edgeinfer.user_folders import user_folder

VERSION = 1
BUSY_SECONDS = 5.0
NAME_LENGTH = 80
EXCERPT_LENGTH = 60
SCHEMA = """
CREATE TABLE chats (
    id INTEGER PRIMARY KEY, name TEXT UNIQUE, model TEXT NOT NULL, system TEXT,
    created REAL NOT NULL, changed REAL NOT NULL, tip INTEGER REFERENCES turns
);
CREATE TABLE turns (
    id INTEGER PRIMARY KEY, chat INTEGER NOT NULL REFERENCES chats ON DELETE CASCADE,
    parent INTEGER REFERENCES turns, role TEXT NOT NULL, text TEXT NOT NULL, state TEXT NOT NULL,
    created REAL NOT NULL
);
CREATE INDEX turns_of_chat ON turns (chat);
CREATE TABLE pieces (
    turn INTEGER NOT NULL REFERENCES turns ON DELETE CASCADE, number INTEGER NOT NULL, text TEXT NOT NULL,
    PRIMARY KEY (turn, number)
) WITHOUT ROWID;
"""
TABLES = {"chats", "turns", "pieces"}
CHATS = """
SELECT chats.id, name,
    coalesce((SELECT text FROM turns WHERE chat = chats.id AND role = 'user' ORDER BY id LIMIT 1), ''),
    model, system, created, changed, tip, (SELECT count(*) FROM turns WHERE chat = chats.id)
FROM chats
"""
PIECES = "SELECT text FROM pieces WHERE turn = turns.id ORDER BY number"
TEXT = f"text || coalesce((SELECT group_concat(text, '') FROM ({PIECES})), '')"
"""SQL for a message's whole text: the stored text plus the pieces that a crash left."""
MESSAGES = f"SELECT id, chat, parent, role, {TEXT}, state, created FROM turns"


class ChatStore:
    """All chats of a user. A context manager; several programs may have it open at once.

    Source: SQLite's write-ahead log, with synchronous=NORMAL: committed data survives a crash of this
    program; a power failure may lose the last transactions but doesn't damage the file.
    """

    def __init__(self, path: Path | None = None) -> None:
        """Open the store at `path` (None: in the state folder), or create it. A damaged store is renamed,
        with a warning.

        Raises:
            ChatStoreError: not a chat store, one of a later release, or a folder that can't be written.
        """
        self.path = path or user_folder("state") / "chats.sqlite"
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.exists() and not self.path.is_file():
                raise ChatStoreError(f"{self.path}: can't keep chats there: no regular file")
            try:
                self._open()
            except sqlite3.DatabaseError as error:
                if not is_damage(error):
                    raise
                move_aside(self.path, error)
                self._open()
        except (sqlite3.Error, OSError) as error:
            why = getattr(error, "strerror", None) or error
            raise ChatStoreError(f"{self.path}: can't keep chats there: {why}") from error

    def _open(self) -> None:
        if self.path.exists():
            check_store(self.path, VERSION, TABLES)
        new = not self.path.exists()
        self.connection = sqlite3.connect(self.path, timeout=BUSY_SECONDS, factory=CheckedConnection)
        self.connection.path = str(self.path)
        self.connection.text_factory = decoded
        try:
            if new:
                with suppress(OSError):  # chats are private
                    os.chmod(self.path, 0o600)
            self._prepare()
        except BaseException:
            self.connection.close()
            raise

    def _prepare(self) -> None:
        self.connection.execute("PRAGMA journal_mode = WAL")
        self.connection.execute("PRAGMA synchronous = NORMAL")
        self.connection.execute("PRAGMA foreign_keys = ON")
        self.connection.execute("PRAGMA secure_delete = ON")  # deleted data is overwritten
        self.connection.create_function("folded", 1, _folded, deterministic=True)
        (version,) = self.connection.execute("PRAGMA user_version").fetchone()
        if version > VERSION:
            raise ChatStoreError(
                f"{self.path}: written by a later edgeinfer (its version {version}, wanted {VERSION} at most)"
            )
        if version == 0:
            self._make()

    def _make(self) -> None:
        self.connection.execute("BEGIN IMMEDIATE")
        (version,) = self.connection.execute("PRAGMA user_version").fetchone()
        if version == 0:  # otherwise another program has created the schema
            for statement in filter(str.strip, SCHEMA.split(";")):
                self.connection.execute(statement)
            self.connection.execute(f"PRAGMA user_version = {VERSION}")
        self.connection.commit()

    def new_chat(self, model: str, system: str | None = None, name: str | None = None) -> StoredChat:
        """Create a chat.

        Raises:
            ChatStoreError: the name is taken or invalid (see `check_name`).
        """
        if name is not None:
            check_name(name)
        now = time.time()
        try:
            with self.connection:
                cursor = self.connection.execute(
                    "INSERT INTO chats (name, model, system, created, changed) VALUES (?, ?, ?, ?, ?)",
                    (name, model, system, now, now),
                )
        except sqlite3.IntegrityError as error:
            raise ChatStoreError(f"{name}: there is a chat of that name already") from error
        return self.chat(str(cursor.lastrowid))

    def chat(self, label: str) -> StoredChat:
        """A chat by its name or number.

        Raises:
            ChatStoreError: there is none.
        """
        by = "name = ?" if not label.isdecimal() else "chats.id = ?"
        chats = self._chats(f"WHERE {by}", (label,))
        if not chats:
            raise ChatStoreError(f"{label}: no such chat; `edgeinfer history` lists them")
        return chats[0]

    def has(self, name: str) -> bool:
        """Whether there is a chat of that name or number."""
        return bool(self._chats("WHERE name = ? OR CAST(chats.id AS TEXT) = ?", (name, name)))

    def chats(self, limit: int = -1) -> list[StoredChat]:
        """Non-empty chats, most recently changed first."""
        return self._chats("WHERE tip IS NOT NULL ORDER BY changed DESC LIMIT ?", (limit,))

    def add_message(
        self, chat: int, parent: int | None, role: Role, text: str, state: State = "whole"
    ) -> StoredMessage:
        """Add a complete message after `parent` (None: as the first) and move the chat's tip to it.

        Raises:
            ChatStoreError: the parent is of another chat.
            sqlite3.Error: it can't be written.
        """
        return self.message(self.insert(chat, parent, role, text, state))

    def begin_message(self, chat: int, parent: int | None, role: Role = "assistant") -> MessageWriter:
        """Start a streamed message; `Raises` as `add_message`."""
        return MessageWriter(self.connection, self.insert(chat, parent, role, "", "coming"))

    def update_response(self, message: int, text: str, state: State) -> StoredMessage:
        """Replace the text and the state of a response that is being generated.

        Raises:
            ChatStoreError: there is no such message, or it is complete.
            sqlite3.Error: it can't be written.
        """
        if self.message(message).state != "coming":
            raise ChatStoreError(f"message {message}: it is complete; its text can't be replaced")
        with self.connection:
            self.connection.execute("DELETE FROM pieces WHERE turn = ?", (message,))
            self.connection.execute(
                "UPDATE turns SET text = ?, state = ? WHERE id = ?", (storable(text), state, message)
            )
        return self.message(message)

    def message(self, message: int) -> StoredMessage:
        """One message. Raises ChatStoreError if it doesn't exist."""
        messages = self._messages("WHERE id = ?", (message,))
        if not messages:
            raise ChatStoreError(f"message {message}: no such message")
        return messages[0]

    def branch(self, chat: StoredChat, tip: int | None = None) -> list[StoredMessage]:
        """The messages from the first one to `tip` (None: the chat's tip), in order."""
        by_id = {message.id: message for message in self._messages("WHERE chat = ?", (chat.id,))}
        line = []
        at = chat.tip if tip is None else tip
        while at in by_id:
            message = by_id[at]
            line.append(message)
            # A parent has a smaller id; a damaged store could otherwise cause an endless loop.
            at = message.parent if message.parent is not None and message.parent < message.id else None
        return line[::-1]

    def messages(self, chat: StoredChat) -> list[StoredMessage]:
        """The messages of all branches in order of creation, so each after its parent."""
        return self._messages("WHERE chat = ? ORDER BY id", (chat.id,))

    def alternatives(self, message: StoredMessage) -> list[StoredMessage]:
        """All messages with the same parent in order of creation, including `message`."""
        return self._messages("WHERE chat = ? AND parent IS ? ORDER BY id", (message.chat, message.parent))

    def move_to(self, message: StoredMessage) -> StoredChat:
        """Set the chat's tip to the newest leaf below `message`."""
        at = message.id
        while children := self._messages("WHERE parent = ? AND id > ? ORDER BY id DESC LIMIT 1", (at, at)):
            at = children[0].id
        with self.connection:
            self.connection.execute("UPDATE chats SET tip = ? WHERE id = ?", (at, message.chat))
        return self.chat(str(message.chat))

    def search(self, text: str, limit: int = 50) -> list[SearchHit]:
        """Messages that contain a text, ignoring case, newest first."""
        messages = self._messages(
            f"WHERE instr(folded(CAST({TEXT} AS BLOB)), folded(CAST(? AS BLOB))) > 0 "
            "ORDER BY id DESC LIMIT ?",
            (text, limit),
        )
        numbers = {message.chat for message in messages}
        chats = {chat.id: chat for number in numbers for chat in self._chats("WHERE chats.id = ?", (number,))}
        return [
            SearchHit(chats[message.chat], message, _excerpt(message.text, text))
            for message in messages
            if message.chat in chats
        ]

    def set_system(self, chat: StoredChat, text: str | None) -> None:
        """Set the system prompt of a chat."""
        with self.connection:
            self.connection.execute("UPDATE chats SET system = ? WHERE id = ?", (text, chat.id))

    def set_model(self, chat: StoredChat, model: str) -> None:
        """Set the model of a chat."""
        with self.connection:
            self.connection.execute("UPDATE chats SET model = ? WHERE id = ?", (model, chat.id))

    def rename(self, chat: StoredChat, name: str) -> StoredChat:
        """Name a chat. Raises ChatStoreError if the name is taken or invalid (see `check_name`)."""
        check_name(name)
        try:
            with self.connection:
                self.connection.execute("UPDATE chats SET name = ? WHERE id = ?", (name, chat.id))
        except sqlite3.IntegrityError as error:
            raise ChatStoreError(f"{name}: there is a chat of that name already") from error
        return self.chat(str(chat.id))

    def snapshot_owner(self, chat: int) -> str:
        """Owner id for `Model.keep_snapshot`; the chat's prompt cache is deleted with the chat."""
        return hashlib.sha256(f"{self.path.absolute()}\0{chat}".encode()).hexdigest()[:16]

    def delete(self, chat: StoredChat) -> None:
        """Delete a chat with all its branches and its prompt cache.

        Raises `OSError`: a prompt cache file can't be deleted; the chat itself is deleted.
        """
        with self.connection:
            self.connection.execute("UPDATE chats SET tip = NULL WHERE id = ?", (chat.id,))
            self.connection.execute("UPDATE turns SET parent = NULL WHERE chat = ?", (chat.id,))
            self.connection.execute("DELETE FROM chats WHERE id = ?", (chat.id,))
        self.connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        delete_snapshots(self.snapshot_owner(chat.id))

    def close(self) -> None:
        """Close the file."""
        self.connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def insert(self, chat: int, parent: int | None, role: Role, text: str, state: State) -> int:
        if parent is not None and self.message(parent).chat != chat:
            raise ChatStoreError(f"message {parent}: of another chat")
        now = time.time()
        with self.connection:
            cursor = self.connection.execute(
                "INSERT INTO turns (chat, parent, role, text, state, created) VALUES (?, ?, ?, ?, ?, ?)",
                (chat, parent, role, storable(text), state, now),
            )
            self.connection.execute(
                "UPDATE chats SET tip = ?, changed = ? WHERE id = ?", (cursor.lastrowid, now, chat)
            )
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def _chats(self, condition: str, values: Sequence[object]) -> list[StoredChat]:
        rows = self.connection.rows(f"{CHATS} {condition}", values)
        return [stored_chat(row) for row in rows]

    def _messages(self, condition: str, values: Sequence[object]) -> list[StoredMessage]:
        return [stored_message(row) for row in self.connection.rows(f"{MESSAGES} {condition}", values)]


def check_name(name: str) -> None:
    """Raise ChatStoreError unless the name is valid: it fits one line and isn't a number."""
    if not name.strip() or name.isdecimal():
        raise ChatStoreError(f"{name!r}: wanted a name that isn't a number")
    if len(name) > NAME_LENGTH or not name.isprintable():
        raise ChatStoreError(
            f"{name[:NAME_LENGTH]!r}: wanted a name of {NAME_LENGTH} characters at most, on one line"
        )


def _folded(text: bytes) -> str:
    """Case-folded text, from bytes, because SQLite passes no text that isn't UTF-8."""
    return decoded(text).casefold()


def _excerpt(text: str, query: str) -> str:
    """The line that contains the match."""
    at = max(text.casefold().find(query.casefold()), 0)
    start = max(0, at - EXCERPT_LENGTH // 2)
    part = " ".join(text[start : at + len(query) + EXCERPT_LENGTH].split())
    return ("..." if start else "") + part
