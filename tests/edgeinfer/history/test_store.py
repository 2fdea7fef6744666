"""Chats on the disk: branches, crashes, a full disk, search, export."""

import json
import os
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest

from edgeinfer.history.export import as_json_lines, as_markdown
from edgeinfer.history.message_writer import MessageWriter
from edgeinfer.history.records import StoredChat
from edgeinfer.history.store import ChatStore, ChatStoreError
from edgeinfer.snapshots.snapshot_file import Snapshot
from edgeinfer.snapshots.store import SnapshotStore

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ChatStore]:
    with ChatStore(tmp_path / "deep" / "chats.sqlite") as opened:
        yield opened


def texts(store: ChatStore, chat: StoredChat) -> list[str]:
    return [message.text for message in store.branch(store.chat(chat.label))]


def test_messages_keep_their_order_after_reopening_the_store(store: ChatStore) -> None:
    chat = store.new_chat("tiny", "Be kind.", "foxes")
    user_message = store.add_message(chat.id, None, "user", "Who are you?")
    writer = store.begin_message(chat.id, user_message.id)
    for piece in ("A ", "fox", "."):
        writer.add(piece)
    assert writer.finish() is None
    store.add_message(chat.id, writer.message, "user", "Why?")
    with ChatStore(store.path) as again:
        result = again.chat("foxes")
        assert (result.title, result.model, result.system, result.messages) == (
            "Who are you?",
            "tiny",
            "Be kind.",
            3,
        )
        assert texts(again, result) == ["Who are you?", "A fox.", "Why?"]
        assert [message.state for message in again.branch(result)] == ["whole"] * 3
        assert [one.label for one in again.chats()] == ["foxes"]


@pytest.mark.skipif(sys.platform == "win32", reason="modes are those of POSIX")
def test_the_store_is_readable_by_its_owner_only(store: ChatStore) -> None:
    assert stat.S_IMODE(store.path.stat().st_mode) == 0o600


def test_a_regenerated_response_is_an_alternative(store: ChatStore) -> None:
    chat = store.new_chat("tiny")
    user_message = store.add_message(chat.id, None, "user", "Hi")
    first = store.add_message(chat.id, user_message.id, "assistant", "Hello")
    more = store.add_message(chat.id, first.id, "user", "And?")
    second = store.add_message(chat.id, user_message.id, "assistant", "Hey")
    assert store.alternatives(second) == [first, second]
    assert texts(store, chat) == ["Hi", "Hey"]
    moved = store.move_to(first)
    assert moved.tip == more.id
    assert texts(store, chat) == ["Hi", "Hello", "And?"]


def test_an_edited_message_is_a_branch_of_its_parent(store: ChatStore) -> None:
    chat = store.new_chat("tiny")
    first = store.add_message(chat.id, None, "user", "Hi")
    other = store.add_message(chat.id, None, "user", "Hello")
    assert store.alternatives(first) == [first, other]
    assert texts(store, chat) == ["Hello"]


def test_an_empty_chat_is_not_listed_and_names_are_unique(store: ChatStore) -> None:
    chat = store.new_chat("tiny", name="foxes")
    assert store.chats() == []
    assert store.has("foxes")
    assert not store.has("bears")
    for name, message in {
        "foxes": "foxes: there is a chat of that name already",
        "7": "'7': wanted a name that isn't a number",
        " ": "' ': wanted a name that isn't a number",
        "a\nb": "wanted a name of 80 characters at most, on one line",
        "x" * 81: "wanted a name of 80 characters at most, on one line",
    }.items():
        with pytest.raises(ChatStoreError, match=message):
            store.new_chat("tiny", name=name)
        with pytest.raises(ChatStoreError, match=message):
            store.rename(store.new_chat("tiny"), name)
    other = store.new_chat("tiny")
    with pytest.raises(ChatStoreError, match="there is a chat of that name already"):
        store.rename(other, "foxes")
    assert store.rename(other, "bears").label == "bears"
    with pytest.raises(ChatStoreError, match="no such chat; `edgeinfer history` lists them"):
        store.chat("wolves")
    with pytest.raises(ChatStoreError, match="of another chat"):
        store.add_message(other.id, store.add_message(chat.id, None, "user", "Hi").id, "assistant", "x")


def test_a_chat_is_deleted_with_all_its_branches(store: ChatStore) -> None:
    chat, other = store.new_chat("tiny"), store.new_chat("tiny")
    user_message = store.add_message(chat.id, None, "user", "Hi")
    store.begin_message(chat.id, user_message.id).add("cut")
    store.add_message(other.id, None, "user", "Hello")
    store.delete(chat)
    assert [one.id for one in store.chats()] == [other.id]
    raw = sqlite3.connect(store.path)
    assert raw.execute("SELECT (SELECT count(*) FROM turns), (SELECT count(*) FROM pieces)").fetchone() == (
        1,
        0,
    )
    raw.close()


CHILD = """
import sys, time
from pathlib import Path
from edgeinfer.history.store import ChatStore
store = ChatStore(Path(sys.argv[1]))
chat = store.new_chat("tiny", name=sys.argv[2])
asked = store.add_message(chat.id, None, "user", "Count!")
writer = store.begin_message(chat.id, asked.id)
for number in range(100000):
    writer.add(f"{number} ")
    print(number, flush=True)
"""


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("after", [0, 1, 7, 150, 1000])
def test_kill_9_during_a_response_loses_nothing(after: int, tmp_path: Path) -> None:
    path = tmp_path / "chats.sqlite"
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(path), "killed"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        cwd=ROOT,
    )
    assert child.stdout is not None
    last = -1
    while last < after:
        last = int(child.stdout.readline())
    child.kill()
    child.wait()
    output = child.stdout.read().split()
    child.stdout.close()
    last = max([last, *map(int, output)])
    with ChatStore(path) as store:
        messages = store.branch(store.chat("killed"))
        assert [message.state for message in messages] == ["whole", "coming"]
        numbers = messages[1].text.split()
        assert numbers == [str(number) for number in range(len(numbers))]
        assert len(numbers) >= last + 1  # every number that was shown is stored
        writer = store.begin_message(messages[1].chat, messages[1].id)
        writer.add("on it goes")
        assert writer.finish() is None


class InterruptedConnection(sqlite3.Connection):
    """Ctrl-C comes after the commit, before the call returns."""

    after = 2

    def __exit__(self, *error: Any) -> Literal[False]:
        super().__exit__(*error)
        self.after -= 1
        if self.after == 0:
            raise KeyboardInterrupt
        return False


def test_ctrl_c_after_a_write_neither_loses_nor_repeats_text(store: ChatStore) -> None:
    chat = store.new_chat("tiny")
    user_message = store.add_message(chat.id, None, "user", "Who?")
    message = store.begin_message(chat.id, user_message.id).message
    connection = sqlite3.connect(store.path, factory=InterruptedConnection)
    writer = MessageWriter(connection, message)
    writer.add("A ")
    with pytest.raises(KeyboardInterrupt):
        writer.add("little ")
    writer.add("fox")
    assert (writer.last_error, store.message(message).text) == (None, "A little fox")
    assert writer.finish("stopped") is None
    connection.close()
    assert (store.message(message).text, store.message(message).state) == ("A little fox", "stopped")


def fill(store: ChatStore) -> None:
    """From now on the disk is full for SQLite."""
    connection = store.connection
    (pages,) = connection.execute("PRAGMA page_count").fetchone()
    connection.execute(f"PRAGMA max_page_count = {pages}")


def test_a_full_disk_is_reported_and_pending_text_is_written_later(store: ChatStore) -> None:
    chat = store.new_chat("tiny")
    user_message = store.add_message(chat.id, None, "user", "Hi")
    writer = MessageWriter(
        store.connection, store.begin_message(chat.id, user_message.id).message, retry_seconds=0
    )
    writer.add("before. ")
    fill(store)
    for _ in range(40):
        writer.add("x" * 1000)
    assert writer.last_error == "database or disk is full"
    assert writer.finish("stopped") == "database or disk is full"
    assert texts(store, chat)[1].startswith("before. ")
    store.connection.execute("PRAGMA max_page_count = 1000000")
    assert writer.finish("stopped") is None
    (_, response) = store.branch(store.chat(chat.label))
    assert (response.text, response.state) == ("before. " + "x" * 40_000, "stopped")


def test_a_failing_store_is_not_retried_at_every_token(store: ChatStore) -> None:
    chat = store.new_chat("tiny")
    user_message = store.add_message(chat.id, None, "user", "Hi")
    writer = store.begin_message(chat.id, user_message.id)
    fill(store)
    attempts: list[str] = []
    store.connection.set_trace_callback(attempts.append)
    for _ in range(100):
        writer.add("x" * 10_000)
    store.connection.set_trace_callback(None)
    assert len([line for line in attempts if line.startswith("INSERT")]) == 1


def test_two_programs_may_write_at_once(tmp_path: Path) -> None:
    path, failures = tmp_path / "chats.sqlite", []

    def write(name: str) -> None:
        try:
            with ChatStore(path) as store:
                chat = store.new_chat("tiny", name=name)
                message = store.begin_message(chat.id, None, "user")
                for number in range(50):
                    message.add(f"{number} ")
                    assert message.last_error is None
                message.finish()
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(f"chat {number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    with ChatStore(path) as store:
        assert {store.branch(chat)[0].text for chat in store.chats()} == {
            "".join(f"{number} " for number in range(50))
        }
        assert len(store.chats()) == 4


def test_search_ignores_case_and_includes_interrupted_responses(store: ChatStore) -> None:
    chat = store.new_chat("tiny", name="foxes")
    user_message = store.add_message(chat.id, None, "user", "Wo wohnt der FUCHS?")
    store.begin_message(chat.id, user_message.id).add(
        "In der STRASSE am Ende des langen, langen Waldes, wo der Bach fliesst"
    )
    result = store.search("straße")
    assert [(one.chat.label, one.message.role) for one in result] == [("foxes", "assistant")]
    assert result[0].excerpt.startswith("In der STRASSE")
    assert [one.message.role for one in store.search("w")] == ["assistant", "user"]
    assert store.search("bach")[0].excerpt.startswith("...")
    assert store.search("%") == []


def test_invalid_unicode_becomes_a_replacement_character(store: ChatStore) -> None:
    chat = store.new_chat("tiny")
    assert store.add_message(chat.id, None, "user", "half \ud83d a smile").text == "half ? a smile"


def test_a_store_at_a_file_path_or_of_a_later_release_is_refused(tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(b"")
    later = tmp_path / "later.sqlite"
    raw = sqlite3.connect(later)
    raw.execute("PRAGMA user_version = 2")
    raw.close()
    with pytest.raises(ChatStoreError, match="written by a later edgeinfer"):
        ChatStore(later)
    with pytest.raises(ChatStoreError, match="can't keep chats there"):
        ChatStore(other / "chats.sqlite")


def test_a_chat_is_exported_as_markdown_and_as_json_lines(store: ChatStore) -> None:
    chat = store.new_chat("tiny", "Be kind.")
    user_message = store.add_message(chat.id, None, "user", "Hi\n")
    store.begin_message(chat.id, user_message.id).add("Hel")
    chat = store.chat(chat.label)
    text = as_markdown(chat, store.branch(chat))
    assert text.startswith("# Hi\n\ntiny, 20")
    assert "\n## System\n\nBe kind.\n\n## You\n\nHi\n\n## Model (cut off)\n\nHel\n" in text
    rows = [json.loads(line) for line in as_json_lines(chat, store.branch(chat)).splitlines()]
    assert (rows[0]["model"], rows[0]["system"]) == ("tiny", "Be kind.")
    assert [(row["role"], row["content"], row["state"]) for row in rows[1:]] == [
        ("user", "Hi\n", "whole"),
        ("assistant", "Hel", "coming"),
    ]
    assert rows[2]["parent"] == rows[1]["id"]


@pytest.mark.parametrize("opening", ["<think>", ""], ids=["marked", "opened by the template"])
def test_reasoning_is_quoted_in_markdown_and_unchanged_in_json_lines(store: ChatStore, opening: str) -> None:
    chat, output = store.new_chat("tiny"), f"{opening}\nShe greets.\n\nSo do I.\n</think>\n\nHello!"
    user_message = store.add_message(chat.id, None, "user", "Hi </think> you")
    store.add_message(chat.id, user_message.id, "assistant", output)
    chat = store.chat(chat.label)
    text = as_markdown(chat, store.branch(chat))
    assert "\n## You\n\nHi </think> you\n\n## Model\n\n> She greets.\n>\n> So do I.\n\nHello!\n" in text
    assert json.loads(as_json_lines(chat, store.branch(chat)).splitlines()[2])["content"] == output


def test_a_deleted_chat_leaves_no_snapshot_and_no_text(
    store: ChatStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edgeinfer.snapshots.store.snapshots_folder", lambda: tmp_path / "snapshots")
    snapshots = SnapshotStore(tmp_path / "snapshots", "a" * 32)
    secret, other = store.new_chat("tiny"), store.new_chat("tiny")
    store.add_message(secret.id, None, "user", "the word is xylophone")
    for number, chat in enumerate((secret, other)):
        snapshot = Snapshot([number, 2, 3], [np.zeros(4, np.float16)])
        assert snapshots.keep(snapshot, store.snapshot_owner(chat.id))
    store.delete(store.chat(str(secret.id)))
    assert len(list((tmp_path / "snapshots").iterdir())) == 1
    files = [path for path in store.path.parent.iterdir() if b"xylophone" in path.read_bytes()]
    assert files == []
