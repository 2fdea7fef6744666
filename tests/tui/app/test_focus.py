"""Typed characters go into the message, unless a message is focused and shows a key."""

from pathlib import Path

import pytest
from textual import events

from edgeinfer.errors import SettingError
from edgeinfer.history.records import title_of, written_part
from edgeinfer.history.store import ChatStore
from edgeinfer_tui.app.message_input import with_files
from edgeinfer_tui.app.model_status import StatusBar, keys_text
from edgeinfer_tui.command_words import common_beginning, completions, unknown_command_message
from tests.tui.app.conftest import Chat, Opened
from tests.tui.fake_library import FakeModel

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


def footer(chat: Chat) -> str:
    return str(chat.screen.query_one(StatusBar).render())


async def test_letters_are_written_after_a_chat_is_opened(opened: Opened, tmp_path: Path) -> None:
    with ChatStore(tmp_path / "chats.sqlite") as store:
        made = store.new_chat("tiny").id
        user_message = store.add_message(made, None, "user", "Of foxes")
        store.add_message(made, user_message.id, "assistant", "They are red.")
    model = FakeModel()
    async with opened(model) as chat:
        await chat.press("ctrl+f")
        await chat.until(lambda: chat.app.screen.query("OptionList").first().option_count)  # type: ignore[attr-defined]
        await chat.press(*"red")
        await chat.press("enter")
        await chat.settle()
        await chat.press(*"recent")
        assert chat.screen.input.text == "recent"
        assert model.prompts == []


async def test_the_footer_shows_the_keys_of_a_focused_message(opened: Opened) -> None:
    async with opened(FakeModel("Code:\n\n```py\none\n```\n\n```py\ntwo\n```")) as chat:
        await chat.say("Hi")
        assert "tokens" in footer(chat)
        await chat.press("tab")
        assert footer(chat) == "e edit · r again · c copy · 1-2 copy code · Esc write"
        await chat.press("up")
        assert footer(chat) == "e edit · r again · c copy · Esc write"
        await chat.press("escape")
        assert "tokens" in footer(chat)


def test_a_narrow_footer_keeps_the_escape_key() -> None:
    keys = ["e edit", "r again", "c copy", "Esc write"]
    assert keys_text(80, keys) == "e edit · r again · c copy · Esc write"
    assert keys_text(30, keys) == "e edit · r again · Esc write"
    assert keys_text(5, keys) == "Esc write"


async def test_an_unbound_letter_is_inserted(opened: Opened) -> None:
    model = FakeModel()
    async with opened(model) as chat:
        await chat.say("Hi")
        await chat.press("tab")
        await chat.press(*"what")  # w is no key; h, a, t are written after it
        assert chat.screen.input.text == "what"
        assert chat.screen.focused is chat.screen.input
        await chat.press("ctrl+u", "tab")
        await chat.press("t", "1")  # nothing can be unfolded and no code copied
        assert chat.screen.input.text == "t1"
        assert len(model.prompts) == 1


async def test_tab_stays_in_a_message_that_is_being_written(opened: Opened) -> None:
    model = FakeModel()
    async with opened(model) as chat:
        await chat.say("Hi")
        await chat.press(*"wo", "tab", *"rd")
        assert chat.screen.input.text == "word"


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("page", ["", "tab", "f1", "f2"])
async def test_a_paste_is_never_lost(opened: Opened, page: str) -> None:
    async with opened() as chat:
        await chat.say("Hi")
        await chat.press(*([page] if page else []))
        if page == "f2":
            chat.app.screen.query_one("#save").focus()
            await chat.pilot.pause()
        chat.app.post_message(events.Paste("one\ntwo"))
        await chat.pilot.pause()
        await chat.pilot.pause()
        assert chat.screen.input.text == "one\ntwo"


async def test_a_paste_replaces_a_selection(opened: Opened) -> None:
    async with opened() as chat:
        chat.screen.input.text = "old"
        chat.screen.input.select_all()
        chat.app.post_message(events.Paste("new"))
        await chat.until(lambda: chat.screen.input.text == "new")


async def test_ctrl_u_clears_the_whole_message(opened: Opened) -> None:
    async with opened() as chat:
        await chat.press(*"one", "ctrl+j", *"two", "home", "ctrl+u")
        assert chat.screen.input.text == ""


@pytest.mark.slow
async def test_tab_completes_commands_and_models(opened: Opened) -> None:
    async with opened() as chat:
        await chat.press(*"/reg", "tab")
        assert chat.screen.input.text == "/regen"
        await chat.press("ctrl+u", *"/s", "tab")
        assert chat.screen.input.text == "/s"
        assert any("/settings" in notice and "/system" in notice for notice in chat.notices())
        await chat.press("ctrl+u", *"/mo", "tab")
        assert chat.screen.input.text == "/model "
        await chat.press(*"ti", "tab")
        assert chat.screen.input.text == "/model tiny"


def test_a_line_has_completions() -> None:
    commands = {
        "/model": lambda text: [name for name in ("a1", "a2") if name.startswith(text)],
        "/exit": None,
    }
    assert completions("/", commands) == ["/model ", "/exit"]
    assert completions("/model ", commands) == ["/model a1", "/model a2"]
    assert completions("/exit now", commands) == []
    assert completions("hello", commands) == []
    assert completions("", commands) == []
    assert common_beginning(["/model a1", "/model a2"]) == "/model a"
    assert common_beginning([]) == ""
    assert (
        unknown_command_message("/modle", list(commands)) == "/modle: no such command; did you mean /model?"
    )
    assert unknown_command_message("/zzz", list(commands)) == "/zzz: no such command; there are /model /exit"
    assert len(unknown_command_message("/" + "z" * 10_000, list(commands))) < 100


# Files.


@pytest.mark.default_cases(2)
@pytest.mark.parametrize(
    "name", ["/no/such/file", "./missing", "~/nowhere/at/all", '"a b"', "notes.txt", "src/a.py,"]
)
async def test_a_missing_file_is_reported_and_nothing_is_lost(opened: Opened, name: str) -> None:
    with pytest.raises(SettingError, match="no such file"):
        with_files(f"Explain @{name}")
    model = FakeModel()
    async with opened(model) as chat:
        await chat.say(f"Explain @{name}")
        assert chat.screen.input.text == f"Explain @{name}"
        assert any("no such file; the message wasn't sent" in notice for notice in chat.notices())
        assert model.prompts == []


async def test_a_title_holds_no_text_of_a_file(opened: Opened, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("secret foxes", encoding="utf-8")
    async with opened() as chat:
        await chat.say(f"Sum up @{tmp_path}/notes.txt")
        assert "secret" not in chat.stored()[0].title
        assert chat.stored()[0].title.startswith("Sum up @")
        assert "secret" not in chat.app.chat.session.title


def test_titles_omit_file_contents_only() -> None:
    assert title_of("One\ntwo  three") == "One two three"
    assert title_of("x" * 100) == "x" * 57 + "..."
    message = 'Look at @"a b.txt" and this:\n\nOutput:\n```\nerror\n```'
    assert written_part(message) == message
    assert written_part(f"{message}\n\na b.txt:\n```txt\nhidden\n```") == message
