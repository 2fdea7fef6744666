"""Messages that are selected, edited, regenerated and switched between alternatives."""

from pathlib import Path

import pytest

from edgeinfer.history.store import ChatStore
from tests.tui.app.conftest import Chat, Opened
from tests.tui.fake_library import ANSWER, FakeModel

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


def head(chat: Chat, index: int) -> str:
    return str(chat.views()[index].query_one(".head").render())


async def test_a_regenerated_response_is_an_alternative(opened: Opened) -> None:
    model = FakeModel()
    async with opened(model) as chat:
        await chat.say("Hi")
        model.response = "A bear."
        await chat.press("f5")
        await chat.settle()
        assert chat.shown() == ["Hi", "A bear."]
        assert "2/2" in head(chat, 1)
        await chat.press("tab", "left")
        await chat.settle()
        assert chat.shown() == ["Hi", ANSWER]
        assert "1/2" in head(chat, 1)
        assert [message.text for message in chat.messages()] == ["Hi", ANSWER]
        await chat.press("right")
        await chat.settle()
        assert chat.shown() == ["Hi", "A bear."]


async def test_a_regenerated_response_uses_the_next_seed(opened: Opened) -> None:
    model = FakeModel()
    async with opened(model, generation={"seed": 7}) as chat:
        await chat.say("Hi")
        await chat.press("f5")
        await chat.settle()
        await chat.press("f5")
        await chat.settle()
        await chat.say("And?")
        assert [settings["seed"] for settings in model.settings] == [7, 8, 9, 7]


async def test_the_model_continues_from_the_branch_that_is_shown(opened: Opened) -> None:
    model = FakeModel()
    async with opened(model) as chat:
        await chat.say("Hi")
        model.response = "A bear."
        await chat.press("f5")
        await chat.settle()
        await chat.press("tab", "left", "escape")
        await chat.say("Go on")
        assert [message["content"] for message in model.chats[0].messages] == [
            "Hi",
            ANSWER,
            "Go on",
            "A bear.",
        ]


async def test_an_edited_message_begins_a_branch_and_the_old_one_stays(opened: Opened) -> None:
    model = FakeModel()
    async with opened(model) as chat:
        await chat.say("One")
        await chat.say("Two")
        await chat.press("tab", "up", "up", "up", "e")
        assert chat.screen.input.text == "One"
        await chat.say("Three")
        assert chat.shown() == ["Three", ANSWER]
        assert "2/2" in head(chat, 0)
        assert model.prompts[-1] == "chat[None] Three"
        await chat.press("tab", "up", "left")
        await chat.settle()
        assert chat.shown() == ["One", ANSWER, "Two", ANSWER]


async def test_escape_keeps_a_message_unchanged(opened: Opened) -> None:
    async with opened() as chat:
        await chat.say("One")
        await chat.say("/edit")
        assert chat.screen.input.text == "One"
        await chat.press("escape")
        assert chat.screen.input.text == ""
        await chat.say("Two")
        assert chat.shown() == ["One", ANSWER, "Two", ANSWER]


async def test_edit_with_a_text_sends_it(opened: Opened) -> None:
    async with opened() as chat:
        await chat.say("One")
        await chat.say("/edit Two")
        await chat.settle()
        assert chat.shown() == ["Two", ANSWER]


async def test_quickly_pressed_keys_move_one_message_each(opened: Opened) -> None:
    async with opened() as chat:
        await chat.say("One")
        await chat.say("Two")
        await chat.press("ctrl+up", "ctrl+up", "ctrl+up")
        assert chat.screen.focused is chat.views()[1]
        await chat.press("ctrl+down", "down", "down")
        assert chat.screen.input.has_focus


@pytest.mark.slow
async def test_a_long_chat_shows_its_end_and_earlier_messages_on_scrolling(
    opened: Opened, tmp_path: Path
) -> None:
    with ChatStore(tmp_path / "chats.sqlite") as store:
        made = store.new_chat("tiny").id
        before = None
        for number in range(60):
            role = "assistant" if number % 2 else "user"
            before = store.add_message(made, before, role, f"turn {number}").id  # type: ignore[arg-type]
        stored = store.chat(str(made))
    async with opened(stored=stored) as chat:
        assert chat.shown()[0] == "turn 20"
        chat.screen.set_focus(chat.views()[0])
        await chat.press("up")
        assert chat.shown()[0] == "turn 0"
        assert chat.screen.focused is chat.views()[19]
