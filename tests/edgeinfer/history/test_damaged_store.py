"""A damaged chat store: moved aside with one line, or read as far as possible; never an error at start."""

import os
import sqlite3
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from edgeinfer.history.damaged_store import DamagedStoreError
from edgeinfer.history.store import ChatStore, ChatStoreError
from edgeinfer.history.tree import ChatTree, branch_to


def filled(path: Path, messages: int = 40) -> Path:
    """A store of one chat."""
    with ChatStore(path) as store:
        chat, before = store.new_chat("tiny", "Be kind.", "foxes"), None
        for number in range(messages):
            role = "assistant" if number % 2 else "user"
            before = store.add_message(chat.id, before, role, f"turn {number} " * 50).id  # type: ignore[arg-type]
    return path


def changed(path: Path, *statements: str) -> Path:
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA foreign_keys = OFF")
    with connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()
    return path


def used(path: Path) -> int:
    """Every operation on a store; returns its number of chats."""
    with ChatStore(path) as store:
        chats = store.chats()
        for chat in chats:
            branch_to(ChatTree(store.messages(chat)).with_number(chat.tip))
            for message in store.branch(chat):
                store.alternatives(message)
                store.move_to(message)
        store.search("turn")
        fresh = store.new_chat("tiny")
        store.add_message(fresh.id, None, "user", "Hi")
        return len(chats)


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_bytes(b"no database at all " * 100),
        lambda path: os.truncate(path, 5000),
        lambda path: path.write_bytes(path.read_bytes()[:4096] + b"\xff" * 8192),
        lambda path: changed(path, "DROP TABLE pieces"),
    ],
    ids=["no database", "cut", "pages overwritten", "a table is missing"],
)
def test_a_damaged_store_is_moved_aside(
    tmp_path: Path, damage: Callable[[Path], object], logged: list[str]
) -> None:
    path = filled(tmp_path / "chats.sqlite")
    damage(path)
    before = path.read_bytes()
    assert used(path) == 0
    (moved,) = tmp_path.glob("chats.sqlite.damaged-????????-??????")
    assert moved.read_bytes() == before
    assert len(logged) == 1
    assert logged[0].startswith(f"{path} was damaged (")
    assert logged[0].endswith(f"): moved to {moved.name}, a new one begins")
    assert used(path) == 1  # afterwards the store works
    assert len(logged) == 1


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE turns SET parent = 40 WHERE id = 1",
        "UPDATE turns SET parent = id",
        "UPDATE turns SET parent = 41 - id",
        "UPDATE turns SET parent = 999 WHERE id = 20",
        "DELETE FROM turns WHERE id = 20",
        "UPDATE chats SET tip = 999",
        "UPDATE turns SET chat = 77 WHERE id > 20",
        "UPDATE turns SET text = x'ff00fe', role = 5, state = x'00', created = 'yesterday'",
        "UPDATE turns SET created = 1e300",
        "UPDATE chats SET model = x'ff', created = x'', changed = 'now', system = 5, name = x'c3'",
        "UPDATE turns SET text = CAST(x'61ff62' AS TEXT) WHERE id = 3",
    ],
)
def test_wrong_values_do_not_stop_a_store(tmp_path: Path, statement: str) -> None:
    path = changed(filled(tmp_path / "chats.sqlite"), statement)
    assert used(path) == 1


@pytest.mark.skipif(sys.platform == "win32", reason="no named pipes among its files")
def test_a_pipe_is_refused_as_store(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "chats.sqlite")
    with pytest.raises(ChatStoreError, match="can't keep chats there: no regular file"):
        ChatStore(tmp_path / "chats.sqlite")


def test_damage_to_an_open_store_is_a_clear_error(tmp_path: Path) -> None:
    path = filled(tmp_path / "chats.sqlite")
    with ChatStore(path) as store:
        content = path.read_bytes()
        with path.open("r+b") as file:
            file.seek(4096)
            file.write(b"\xff" * (len(content) - 4096))
        with pytest.raises(DamagedStoreError, match=r"damaged .* moved aside the next time"):
            store.messages(store.chats()[0])
