"""Detects a damaged chat store on opening, and renames it so that a new one can be created."""

import logging
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from edgeinfer.errors import EdgeInferError

LOGGER = logging.getLogger("edgeinfer")
MAX_CHECKED_BYTES = 64 << 20
"""Larger files are not checked completely on opening."""
SIDE_FILES = ("-wal", "-shm")
DAMAGE_CODES = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_FORMAT}


class ChatStoreError(EdgeInferError):
    """The store can't be opened, or it has no such chat or message."""


class DamagedStoreError(ChatStoreError, sqlite3.DatabaseError):
    """The store's file was found to be damaged during use."""


def is_damage(error: BaseException) -> bool:
    """Whether SQLite reports a damaged file."""
    code = getattr(error, "sqlite_errorcode", None)
    return code is not None and code & 0xFF in DAMAGE_CODES


class CheckedConnection(sqlite3.Connection):
    """A connection whose errors about damage are clear."""

    path = "the chat store"

    def execute(self, sql: str, parameters: Any = (), /) -> sqlite3.Cursor:
        """Run a statement. Raises `DamagedStoreError` besides SQLite's own errors."""
        with self.clear_errors():
            return super().execute(sql, parameters)

    def rows(self, statement: str, values: Sequence[object]) -> list[tuple[object, ...]]:
        """All rows of a query. Raises as `execute`."""
        with self.clear_errors():
            return super().execute(statement, values).fetchall()

    @contextmanager
    def clear_errors(self) -> Iterator[None]:
        """Convert SQLite's errors about damage to a `DamagedStoreError`."""
        try:
            yield
        except sqlite3.DatabaseError as error:
            if not is_damage(error):
                raise
            raise DamagedStoreError(
                f"{self.path}: damaged ({error}); it is moved aside the next time that it is opened"
            ) from error


def decoded(text: bytes) -> str:
    """Text of the store; invalid UTF-8 becomes U+FFFD."""
    return text.decode("utf-8", "replace")


def check_store(path: Path, version: int, tables: set[str]) -> None:
    """Check the integrity of a store.

    Raises `sqlite3.DatabaseError`: it is damaged, or is of `version` and lacks some of `tables`.
    """
    if path.stat().st_size > MAX_CHECKED_BYTES:
        return
    try:
        status, seen, names = _integrity_check(path)
    except UnicodeDecodeError:  # raised by Python for a message that quotes a damaged schema
        status, seen, names = "its schema is not text", version, set()
    if status != "ok" or (seen == version and not tables <= names):
        error = sqlite3.DatabaseError(" ".join(status.split())[:100])
        error.sqlite_errorcode = sqlite3.SQLITE_CORRUPT
        raise error


def _integrity_check(path: Path) -> tuple[str, int, set[str]]:
    """SQLite's check result ("ok": no errors), the version, and the table names."""
    with closing(sqlite3.connect(path)) as connection:
        connection.text_factory = decoded
        (status,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
        (seen,) = connection.execute("PRAGMA user_version").fetchone()
        names = {str(name) for (name,) in connection.execute("SELECT name FROM sqlite_schema")}
    return str(status), int(seen), names


def move_aside(path: Path, why: object) -> Path:
    """Rename a damaged store and print a warning. Raises `OSError`."""
    stamp = time.strftime("%Y%m%d-%H%M%S")
    target, number = path.with_name(f"{path.name}.damaged-{stamp}"), 1
    while target.exists():
        target, number = path.with_name(f"{path.name}.damaged-{stamp}-{number}"), number + 1
    path.rename(target)
    for ending in SIDE_FILES:
        with suppress(OSError):
            path.with_name(path.name + ending).rename(target.with_name(target.name + ending))
    LOGGER.warning("%s was damaged (%s): moved to %s, a new one begins", path, why, target.name)
    return target
