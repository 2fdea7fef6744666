"""The saved chats at the side: shown if there is room, opened, renamed, exported and deleted."""

import json
from pathlib import Path

import pytest
from textual.widgets import Input

from edgeinfer.history.records import StoredChat
from edgeinfer.history.store import ChatStore
from edgeinfer_tui.app.chat_list import MIN_WIDTH, ChatActions, ChatList, file_name
from tests.tui.app.conftest import Chat, Opened, PacedModel
from tests.tui.fake_library import ANSWER, FakeModel

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

SIZE = (MIN_WIDTH, 40)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A store with three chats; the last one is the newest."""
    path = tmp_path / "chats.sqlite"
    with ChatStore(path) as store:
        for text in ("Of foxes", "Of [b]bears[/b]\x1b[31m", "Of owls"):
            number = store.new_chat("tiny").id
            message = store.add_message(number, None, "user", text)
            store.add_message(number, message.id, "assistant", "They are here.")
    return path


def chats(chat: Chat) -> ChatList:
    return chat.screen.query_one(ChatList)


def titles(chat: Chat) -> list[str]:
    options = chats(chat).options
    lines = [str(options.get_option_at_index(at).prompt) for at in range(options.option_count)]
    return [line.split("\n")[0] for line in lines]


def dialog_text(chat: Chat) -> str:
    return "\n".join(str(part.render()) for part in chat.app.screen.query("Static"))


@pytest.mark.parametrize(("size", "shown"), [((80, 24), False), ((120, 40), True), ((200, 60), True)])
async def test_chats_are_listed_newest_first_if_there_is_room(
    opened: Opened, saved: Path, size: tuple[int, int], shown: bool
) -> None:
    async with opened(size=size) as chat:
        assert bool(chats(chat).region) == shown
        assert titles(chat) == (["Of owls", "Of [b]bears[/b]�[31m", "Of foxes"] if shown else [])
        await chat.say("Of cats")
        assert titles(chat)[:2] == (["Of cats", "Of owls"] if shown else [])
        assert chat.screen.input.has_focus


async def test_a_terminal_that_becomes_wider_shows_the_list(opened: Opened, saved: Path) -> None:
    async with opened(size=(MIN_WIDTH - 1, 30)) as chat:
        assert not chats(chat).display
        await chat.press("f8")
        assert f"the list of chats needs {MIN_WIDTH} columns" in chat.notices()[0]
        await chat.pilot.resize_terminal(*SIZE)
        await chat.until(lambda: len(titles(chat)) == 3)
        assert chats(chat).display


async def test_f8_goes_to_the_list_and_then_hides_it(opened: Opened, saved: Path) -> None:
    async with opened(size=SIZE) as chat:
        await chat.press("f8")
        assert chats(chat).options.has_focus
        status = str(chat.screen.query_one("#status").render())
        assert status == "Enter opens · r rename · x export · d delete · Esc write"
        await chat.press("f8")
        assert not chats(chat).display
        assert chat.screen.input.has_focus
        await chat.press("f8")
        assert chats(chat).options.has_focus
        await chat.press("H", "o")
        assert chat.screen.input.text == "Ho"


async def test_a_private_chat_lists_none(opened: Opened, saved: Path) -> None:
    async with opened(size=SIZE, is_stored=False) as chat:
        assert not chats(chat).display
        await chat.press("ctrl+l")
        assert chat.notices() == ["this chat is private: past chats can't be opened"]


async def test_a_chat_is_opened_by_key_and_by_click(opened: Opened, saved: Path) -> None:
    async with opened(size=SIZE) as chat:
        await chat.press("f8", "down", "down", "enter")
        await chat.settle()
        assert chat.shown() == ["Of foxes", "They are here."]
        assert chat.screen.input.has_focus
        await chat.pilot.click(chats(chat).options, offset=(3, 1))
        await chat.until(lambda: chat.shown() == ["Of owls", "They are here."])
        await chat.settle()
        await chat.say("More")
        assert [message.text for message in chat.messages()] == ["Of owls", "They are here.", "More", ANSWER]


async def test_the_open_chat_is_renamed(opened: Opened, saved: Path) -> None:
    async with opened(size=SIZE) as chat:
        await chat.press("f8", "enter")
        await chat.settle()
        await chat.press("f8", "r")
        chat.app.screen.query_one(Input).value = "17"
        await chat.press("enter")
        await chat.until(lambda: "wanted a name that isn't a number" in dialog_text(chat))
        chat.app.screen.query_one(Input).value = "night"
        await chat.press("enter")
        await chat.until(lambda: chat.app.screen is chat.screen)
        await chat.settle()
        assert titles(chat)[0] == "night: Of owls"
        assert str(chat.screen.query_one("#title").render()).startswith("night")
        await chat.press("d", "r")
        assert chat.screen.input.text == "dr"
        assert chat.stored()[0].name == "night"


@pytest.mark.parametrize("form", ["md", "jsonl"])
async def test_a_chat_is_exported_to_a_new_file_only(
    opened: Opened, saved: Path, tmp_path: Path, form: str
) -> None:
    target = tmp_path / f"owls.{form}"
    async with opened(size=SIZE) as chat:
        await chat.press("f8", "x")
        line = chat.app.screen.query_one(Input)
        assert line.value == "of-owls.md"
        line.value = str(target)
        await chat.press("enter")
        await chat.until(target.exists)
        await chat.until(lambda: chat.app.screen is chat.screen)
        text = target.read_text(encoding="utf-8")
        assert "They are here." in text
        if form == "jsonl":
            lines = [json.loads(line) for line in text.splitlines()]
            assert "They are here." in str(lines[-1])
        else:
            assert text.startswith("#")
        target.write_text("kept", encoding="utf-8")
        await chat.press("f8", "x")
        chat.app.screen.query_one(Input).value = str(target)
        await chat.press("enter")
        await chat.until(lambda: "exists already, wanted the name of a new file" in dialog_text(chat))
        assert target.read_text(encoding="utf-8") == "kept"


async def test_a_chat_is_deleted_after_a_confirmation(opened: Opened, saved: Path) -> None:
    async with opened(size=SIZE) as chat:
        await chat.press("f8", "down", "delete")
        assert "Delete 2 messages? Of [b]bears[/b]�[31m" in dialog_text(chat)
        await chat.press("enter")
        await chat.settle()
        assert len(chat.stored()) == 3
        await chat.press("d", "right", "enter")
        await chat.settle()
        assert titles(chat) == ["Of owls", "Of foxes"]
        assert [stored.title for stored in chat.stored()] == ["Of owls", "Of foxes"]


async def test_the_open_chat_is_deleted_with_its_cache(opened: Opened, saved: Path) -> None:
    model = FakeModel()
    async with opened(model, size=SIZE) as chat:
        await chat.say("Of cats")
        await chat.press("f8", "d", "right", "enter")
        await chat.settle()
        assert chat.shown() == []
        assert "Of cats" not in titles(chat)
        assert len(chat.stored()) == 3
    assert model.snapshots == 0


async def test_the_open_chat_is_deleted_during_its_response(opened: Opened, saved: Path) -> None:
    model = PacedModel()
    async with opened(model, size=SIZE) as chat:
        await chat.say("Of cats", wait=False)
        model.allow(1)
        await chat.until(lambda: chat.shown() == ["Of cats", "There "] and titles(chat)[0] == "Of cats")
        await chat.press("f8", "d", "right", "enter")
        model.allow(9)
        await chat.settle()
        assert chat.shown() == []
        assert len(chat.stored()) == 3
    assert model.snapshots == 0


async def test_the_words_below_the_list_can_be_clicked(opened: Opened, saved: Path) -> None:
    async with opened(size=SIZE) as chat:
        assert chats(chat).options.highlighted is None
        await chat.pilot.click(chats(chat).query_one(ChatActions), offset=(12, 0))
        await chat.until(lambda: chat.notices() == ["no chat is selected; F8 goes to the list"])
        await chat.press("f8")
        await chat.pilot.click(chats(chat).query_one(ChatActions), offset=(12, 0))
        await chat.until(lambda: "Export to which file?" in dialog_text(chat))


def test_a_file_name_has_no_separators() -> None:
    def stored(title: str) -> StoredChat:
        return StoredChat(7, None, title, "tiny", None, 0.0, 0.0, None, 2)

    assert file_name(stored("../../etc/passwd: what?")) == "etc-passwd-what.md"
    assert file_name(stored("???")) == "7.md"
