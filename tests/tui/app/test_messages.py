"""The full-screen chat: sending, streaming, stopping, storing, quitting."""

import sqlite3
import threading
from pathlib import Path

import pytest

from edgeinfer.history.store import ChatStore
from tests.tui.app.conftest import Opened, PacedModel
from tests.tui.fake_library import ANSWER, FakeModel

pytestmark = pytest.mark.anyio


async def test_a_message_and_its_response_are_saved(opened: Opened) -> None:
    model = FakeModel()
    async with opened(model, generation={"temperature": 0.0}) as chat:
        await chat.say("Hi")
        assert chat.shown() == ["Hi", ANSWER]
        assert [(message.role, message.text, message.state) for message in chat.messages()] == [
            ("user", "Hi", "whole"),
            ("assistant", ANSWER, "whole"),
        ]
        assert chat.screen.input.text == ""
    assert model.prompts == ["chat[None] Hi"]
    assert model.settings == [{"temperature": 0.0}]
    assert (model.snapshots, model.closed) == (1, True)
    assert model.snapshot_owners[0] is not None


@pytest.mark.slow
async def test_shown_text_of_a_running_response_is_already_saved(opened: Opened) -> None:
    model = PacedModel()
    async with opened(model) as chat:
        await chat.say("Hi", wait=False)
        model.allow(2)
        await chat.until(lambda: chat.shown() == ["Hi", "There was "])
        assert [(message.text, message.state) for message in chat.messages()] == [
            ("Hi", "whole"),
            ("There was ", "coming"),
        ]
        model.allow(9)
        await chat.settle()
        assert chat.messages()[1].state == "whole"


@pytest.mark.slow
async def test_a_context_shift_is_reported_during_the_response(opened: Opened) -> None:
    async with opened(FakeModel(shift_after=1), generation={"context_overflow": "shift"}) as chat:
        await chat.say("Hi")
        output = "the context of 1024 tokens was shifted: 256 after the first were evicted"
        assert chat.notices() == [output]


async def test_escape_stops_a_response_and_keeps_the_text(opened: Opened) -> None:
    model = PacedModel()
    async with opened(model) as chat:
        await chat.say("Hi", wait=False)
        model.allow(2)
        await chat.until(lambda: chat.shown() == ["Hi", "There was "])
        await chat.press("escape")
        model.allow(1)
        await chat.settle()
        assert chat.shown() == ["Hi", "There was a "]
        assert (chat.messages()[1].text, chat.messages()[1].state) == ("There was a ", "stopped")
        model.allow(99)
        await chat.say("Go on")
        assert model.prompts == ["chat[None] Hi", "chat[None] Go on"]


async def test_quitting_during_a_response_keeps_its_text(opened: Opened) -> None:
    model = PacedModel()
    async with opened(model) as chat:
        await chat.say("Hi", wait=False)
        model.allow(2)
        await chat.until(lambda: chat.shown() == ["Hi", "There was "])
        await chat.press("ctrl+q")
        model.allow(1)
        await chat.until(lambda: chat.app.at_rest)
        assert (chat.messages()[1].text, chat.messages()[1].state) == ("There was a ", "stopped")
        assert model.closed


@pytest.mark.slow
async def test_a_second_message_stays_in_the_input_line_during_a_response(opened: Opened) -> None:
    model = PacedModel()
    async with opened(model) as chat:
        await chat.say("Hi", wait=False)
        await chat.say("And?", wait=False)
        assert chat.screen.input.text == "And?"
        assert "a response is being generated; Esc stops it" in chat.notices()
        model.allow(99)
        await chat.settle()
        assert model.prompts == ["chat[None] Hi"]


async def test_a_failure_is_reported_under_the_message_and_the_chat_continues(opened: Opened) -> None:
    async with opened() as chat:
        await chat.say("overflow")
        assert chat.messages()[1].state == "failed"
        failure = chat.views()[1].query_one(".failure")
        assert failure.display
        assert "2000 tokens, wanted at most 1024" in str(failure.render())
        await chat.say("Hi")
        assert chat.shown()[2:] == ["Hi", ANSWER]


@pytest.mark.slow
async def test_a_continued_chat_is_shown_and_prefilled(opened: Opened, tmp_path: Path) -> None:
    with ChatStore(tmp_path / "chats.sqlite") as store:
        chat_id = store.new_chat("tiny", "Be brief.", "foxes").id
        user_message = store.add_message(chat_id, None, "user", "Where?")
        store.add_message(chat_id, user_message.id, "assistant", "In a den.")
        stored = store.chat("foxes")
    model = FakeModel()
    async with opened(model, stored=stored) as chat:
        assert chat.shown() == ["Where?", "In a den."]
        await chat.say("And then?")
        assert [one.text for one in chat.messages()] == [
            "Where?",
            "In a den.",
            "And then?",
            ANSWER,
        ]
        assert len(chat.stored()) == 1
    assert model.prompts == ["chat[Be brief.] And then?"]
    assert model.chats[0].messages[:2] == [
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": "In a den."},
    ]


@pytest.mark.slow
async def test_a_continued_chat_is_shown_while_its_model_loads(opened: Opened, tmp_path: Path) -> None:
    with ChatStore(tmp_path / "chats.sqlite") as store:
        chat_id = store.new_chat("tiny", name="foxes").id
        user_message = store.add_message(chat_id, None, "user", "Where?")
        store.add_message(chat_id, user_message.id, "assistant", "In a den.")
        stored = store.chat("foxes")
    started = threading.Event()
    async with opened(stored=stored, load_when=started) as chat:
        assert chat.shown() == ["Where?", "In a den."]
        roles = [str(view.query_one(".head").render()).split()[0] for view in chat.views()]
        assert roles == ["You", "Model"]
        started.set()
        await chat.settle()
        assert str(chat.views()[1].query_one(".head").render()).split()[0] == "fake"


@pytest.mark.slow
async def test_a_private_chat_stores_nothing(opened: Opened, tmp_path: Path) -> None:
    async with opened(is_stored=False) as chat:
        await chat.say("Hi")
        assert chat.shown() == ["Hi", ANSWER]
    assert not (tmp_path / "chats.sqlite").exists()


@pytest.mark.slow
async def test_a_chat_that_cannot_be_stored_is_reported_until_a_message_is_sent(opened: Opened) -> None:
    async with opened(is_stored=False, warnings=["this chat won't be kept: no room"]) as chat:
        warning = chat.screen.query_one("#note")
        assert str(warning.render()) == "this chat won't be kept: no room; a warning of loading"
        await chat.say("Hi")
        assert not warning.display


async def test_a_failed_load_ends_the_program_with_its_reason(opened: Opened) -> None:
    async with opened(MemoryError("no room")) as chat:
        await chat.until(lambda: chat.app.at_rest)
        assert str(chat.app.failure) == "no room"


@pytest.mark.slow
async def test_a_small_terminal_has_room_for_the_messages(opened: Opened) -> None:
    async with opened(size=(40, 12)) as chat:
        await chat.say("Hi")
        assert chat.shown() == ["Hi", ANSWER]
        assert chat.screen.transcript.region.height >= 8
        assert chat.screen.input.region.height >= 1


async def test_the_status_line_reports_context_speed_and_help(opened: Opened) -> None:
    async with opened() as chat:
        await chat.say("Hi")
        line = str(chat.screen.query_one("#status").render())
        assert "13/1024 tokens · 54 t/s" in line
        assert "F1 help" in line


@pytest.mark.slow
async def test_a_message_sent_during_loading_is_processed_after_it(opened: Opened) -> None:
    started = threading.Event()
    async with opened(load_when=started) as chat:
        await chat.say("Hi", wait=False)
        assert chat.shown() == []
        assert "loading the model 1 B/2 B (50%)" in str(chat.screen.query_one("#note").render())
        started.set()
        await chat.until(lambda: chat.shown() == ["Hi", ANSWER])
        assert chat.screen.input.text == ""


async def test_quitting_during_loading_cancels_it(opened: Opened) -> None:
    started = threading.Event()
    async with opened(load_when=started) as chat:
        await chat.press("ctrl+q")
        started.set()
        await chat.until(lambda: chat.app.at_rest)
        assert chat.app.failure is None
        assert chat.app.chat.thread.model is None


@pytest.mark.slow
async def test_a_full_disk_is_reported_while_it_is_full_and_loses_nothing(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*given: object) -> int:
        raise sqlite3.OperationalError("database or disk is full")

    async with opened() as chat:
        await chat.say("One")
        with monkeypatch.context() as patch:
            patch.setattr(ChatStore, "insert", full)
            await chat.say("Two")
            assert "not on the disk yet: database or disk is full" in str(
                chat.screen.query_one("#note").render()
            )
            assert chat.shown() == ["One", ANSWER, "Two", ANSWER]
        await chat.press("ctrl+q")
        await chat.until(lambda: chat.app.at_rest)
        assert chat.app.chat.lost is None
        assert [one.text for one in chat.messages()] == ["One", ANSWER, "Two", ANSWER]
