"""A chat's tree in memory, and the recorder that writes it to the store, later after a failure."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from edgeinfer.history.recorder import Recorder
from edgeinfer.history.store import ChatStore
from edgeinfer.history.tree import ChatTree, branch_to, model_messages, newest_end


@pytest.fixture
def store(tmp_path: Path) -> Iterator[ChatStore]:
    with ChatStore(tmp_path / "chats.sqlite") as opened:
        yield opened


def recorder_of(store: ChatStore) -> Recorder:
    return Recorder(store, lambda: store.new_chat("tiny"))


def test_a_tree_has_branches_alternatives_and_a_newest_leaf() -> None:
    tree = ChatTree()
    user_message = tree.add(None, "user", "Hi")
    first, second = tree.add(user_message, "assistant", "One"), tree.add(user_message, "assistant", "Two")
    more = tree.add(second, "user", "More")
    assert branch_to(more) == [user_message, second, more]
    assert list(tree.alternatives(first)) == [first, second]
    assert tree.sibling(first, 1) is second
    assert tree.sibling(first, -1) is None
    assert newest_end(user_message) is more


def test_only_messages_with_a_response_are_in_the_prompt() -> None:
    tree = ChatTree()
    user_message = tree.add(None, "user", "Hi")
    silent = tree.add(user_message, "assistant", "", "failed")
    again = tree.add(silent, "user", "Hello?")
    response = tree.add(again, "assistant", "Yes.")
    assert model_messages(branch_to(response)) == [
        {"role": "user", "content": "Hello?"},
        {"role": "assistant", "content": "Yes."},
    ]


def test_a_tree_is_restored_unchanged_from_the_store(store: ChatStore) -> None:
    tree, recorder = ChatTree(), recorder_of(store)
    user_message = tree.add(None, "user", "Hi")
    for text in ("One", "Two"):
        response = tree.add(user_message, "assistant", text, "stopped")
        recorder.record(response)
    assert recorder.stored is not None
    restored = ChatTree(store.messages(recorder.stored))
    assert [message.text for message in restored.beginnings] == ["Hi"]
    assert [(message.text, message.state) for message in restored.beginnings[0].children] == [
        ("One", "stopped"),
        ("Two", "stopped"),
    ]
    assert restored.with_number(response.stored) is restored.beginnings[0].children[1]


def test_a_failed_write_is_repeated_with_the_next_message(
    store: ChatStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, recorder = ChatTree(), recorder_of(store)
    user_message = tree.add(None, "user", "Hi")
    response = tree.add(user_message, "assistant", "", "coming")

    def full(*given: object) -> None:
        raise sqlite3.OperationalError("database or disk is full")

    with monkeypatch.context() as patch:
        patch.setattr(store, "insert", full)
        recorder.begin(response)
        recorder.add("A fox.")
        response.text, response.state = "A fox.", "whole"
        recorder.finish(response, "whole")
        assert recorder.last_error == "database or disk is full"
    more = tree.add(response, "user", "More")
    recorder.record(more)
    assert recorder.last_error is None
    assert recorder.stored is not None
    line = store.branch(store.chat(str(recorder.stored.id)))
    assert [message.text for message in line] == ["Hi", "A fox.", "More"]


def test_an_unwritten_end_of_a_response_is_written_later(store: ChatStore) -> None:
    tree, recorder = ChatTree(), recorder_of(store)
    response = tree.add(tree.add(None, "user", "Hi"), "assistant", "", "coming")
    recorder.begin(response)
    recorder.add("A ")
    (pages,) = store.connection.execute("PRAGMA page_count").fetchone()
    store.connection.execute(f"PRAGMA max_page_count = {pages}")
    recorder.add("long " * 5000)
    response.text, response.state = f"A {'long ' * 5000}", "whole"
    recorder.finish(response, "whole")
    assert recorder.last_error == "database or disk is full"
    store.connection.execute("PRAGMA max_page_count = 100000")
    recorder.record(tree.add(response, "user", "More"))
    assert recorder.last_error is None
    assert response.stored is not None
    assert (store.message(response.stored).text, store.message(response.stored).state) == (
        response.text,
        "whole",
    )


def test_the_shown_branch_is_restored(store: ChatStore) -> None:
    tree, recorder = ChatTree(), recorder_of(store)
    user_message = tree.add(None, "user", "Hi")
    first, second = tree.add(user_message, "assistant", "One"), tree.add(user_message, "assistant", "Two")
    recorder.record(first)
    recorder.record(second)
    recorder.set_tip(first)
    recorder.set_system("Be brief.")
    recorder.set_model("other")
    assert recorder.stored is not None
    chat = store.chat(str(recorder.stored.id))
    assert (chat.tip, chat.system, chat.model) == (first.stored, "Be brief.", "other")
