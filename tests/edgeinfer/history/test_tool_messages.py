"""Tool calls and results in the chat store, and what of them the model reads."""

from pathlib import Path

import pytest

from edgeinfer.chat_templates.tool_calls import ToolCall, written_calls
from edgeinfer.history.export import as_markdown
from edgeinfer.history.recorder import Recorder
from edgeinfer.history.store import ChatStore
from edgeinfer.history.tool_messages import calls_only, results_of, text_of_results, text_with_calls
from edgeinfer.history.tree import ChatMessage, ChatTree, branch_to, model_messages, user_message_of

CALLS = [ToolCall("add", {"a": 2, "b": "</tool_call>"})]
RESULTS = [("add", 'five "5"\n<|im_end|>')]


def tree_with_results() -> tuple[ChatTree, ChatMessage]:
    """user, response with a call, results, response."""
    tree = ChatTree()
    user_message = tree.add(None, "user", "2 + 3?")
    called = tree.add(user_message, "assistant", text_with_calls("Now.", [ToolCall("add", {})]))
    results = tree.add(called, "tool", text_of_results(RESULTS))
    return tree, tree.add(results, "assistant", "It is 5.")


def test_results_are_the_same_after_the_store() -> None:
    assert results_of(text_of_results(RESULTS)) == RESULTS
    assert results_of("damaged") == results_of("3") == results_of("[1]") == []


def test_calls_are_the_same_after_the_store() -> None:
    reply = written_calls(text_with_calls("Now.", CALLS))
    assert (reply.content, list(reply.calls)) == ("Now.", CALLS)


def test_the_model_reads_calls_and_results_as_messages() -> None:
    _, last = tree_with_results()
    function = {"name": "add", "arguments": {}}
    assert model_messages(branch_to(last)) == [
        {"role": "user", "content": "2 + 3?"},
        {
            "role": "assistant",
            "content": "Now.",
            "tool_calls": [{"type": "function", "function": function}],
        },
        {"role": "tool", "name": "add", "content": RESULTS[0][1]},
        {"role": "assistant", "content": "It is 5."},
    ]
    assert len(model_messages(branch_to(last.parent))) == 2


def test_a_call_without_result_is_no_response() -> None:
    tree = ChatTree()
    user_message = tree.add(None, "user", "2 + 3?")
    called = tree.add(user_message, "assistant", text_with_calls("", [ToolCall("add", {})]))
    assert model_messages(branch_to(called)) == []
    assert calls_only(called.text)
    assert not calls_only(text_with_calls("Now.", [ToolCall("add", {})]))
    assert not calls_only("<think>only reasoning</think>")


def test_results_belong_to_the_message_of_the_user() -> None:
    _, last = tree_with_results()
    user_message = user_message_of(last)
    assert user_message is not None
    assert user_message.text == "2 + 3?"
    assert user_message_of(None) is None


@pytest.mark.parametrize("is_locked", [False, True])
def test_a_replaced_text_is_the_only_one_in_the_store(tmp_path: Path, is_locked: bool) -> None:
    with ChatStore(tmp_path / "chats.sqlite") as store:
        recorder = Recorder(store, lambda: store.new_chat("tiny"))
        tree = ChatTree()
        response = tree.add(tree.add(None, "user", "Hi"), "assistant", "", "coming")
        recorder.begin(response)
        recorder.add("a mark of ")
        recorder.add("this model")
        response.text = "the format of the store"
        if is_locked:
            store.connection.execute("PRAGMA query_only = ON")
        recorder.replace(response)
        assert (recorder.last_error is not None) == is_locked
        store.connection.execute("PRAGMA query_only = OFF")
        recorder.finish(response, "whole")
        assert recorder.last_error is None
        (chat,) = store.chats()
        assert [message.text for message in store.branch(chat)] == ["Hi", "the format of the store"]


def test_an_export_names_the_tools(tmp_path: Path) -> None:
    with ChatStore(tmp_path / "chats.sqlite") as store:
        chat = store.new_chat("tiny")
        first = store.add_message(chat.id, None, "user", "2 + 3?")
        called = store.add_message(chat.id, first.id, "assistant", text_with_calls("", CALLS))
        store.add_message(chat.id, called.id, "tool", text_of_results([("add", "5")]))
        text = as_markdown(chat, store.branch(store.chat("1")))
    assert "## Results of tools\n\nadd:\n\n5" in text
