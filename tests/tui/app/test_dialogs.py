"""Help, settings, models, past chats, memory: the screens over the chat."""

from pathlib import Path
from types import MappingProxyType

import pytest
from textual.widgets import Input, OptionList, TextArea

from edgeinfer.history.store import ChatStore
from edgeinfer_tui.app.chat_commands import COMMANDS, help_text
from edgeinfer_tui.app.model_status import bar
from tests.tui.app.conftest import Opened
from tests.tui.fake_library import ANSWER, FakeItem, FakeModel, FakePlan

pytestmark = [pytest.mark.anyio, pytest.mark.slow]


class LargePlan(FakePlan):
    items = (
        FakeItem("layer 0 attention", "gpu", 3 << 30),
        FakeItem("head", "gpu", 1 << 30),
        FakeItem("layer 0 keys and values", "gpu", 1 << 30),
        FakeItem("draft model", "gpu", 1 << 29),
        FakeItem("CUDA context", "gpu", 1 << 30),
        FakeItem("layer 1 feed-forward", "cpu", 3 << 30),
    )
    budgets = MappingProxyType({"gpu": 8 << 30, "cpu": 32 << 30})


async def test_help_lists_every_command_with_its_key(opened: Opened) -> None:
    async with opened() as chat:
        await chat.press("f1")
        page = " ".join(str(part.render()) for part in chat.app.screen.query("Static"))
        page = " ".join(page.split())
        for command in COMMANDS:
            assert command.word in page
            assert command.meaning in page
        assert "F3, Ctrl-F" in page
        await chat.press("escape")
        assert chat.app.screen is chat.screen


@pytest.mark.parametrize(("width", "lines"), [(76, 2), (36, 3)])
def test_help_that_is_too_long_for_its_line_continues_indented(width: int, lines: int) -> None:
    page = str(help_text(width)).split("\n")[:-1]
    assert max(map(len, page)) <= width
    at = next(index for index, line in enumerate(page) if line.split()[:1] == ["Esc"])
    reported = page[at : at + lines]
    assert (
        " ".join(" ".join(reported).split()) == "Esc stop the response; leave a message that is being edited"
    )
    assert all(line.startswith("    ") for line in reported[1:])


async def test_settings_apply_from_the_next_response_on(opened: Opened) -> None:
    model = FakeModel()
    async with opened(model, generation={"top_k": 5, "stop": ["x"]}) as chat:
        await chat.press("f2")
        page = chat.app.screen
        page.query_one(TextArea).text = "Be kind."
        page.query_one("#temperature", Input).value = "0.5"
        page.query_one("#top_k", Input).value = ""
        await chat.press("ctrl+s")
        await chat.say("Hi")
        assert chat.stored()[0].system == "Be kind."
    assert model.prompts == ["chat[Be kind.] Hi"]
    assert model.settings == [{"temperature": 0.5, "stop": ["x"]}]


async def test_a_wrong_setting_is_named_and_the_page_stays(opened: Opened) -> None:
    async with opened() as chat:
        for field, value, reported in (
            ("top_k", "many", "top_k: saw 'many', wanted a whole number"),
            ("temperature", "-1", "temperature"),
            ("max_tokens", "-3", "max_tokens: saw -3"),
        ):
            await chat.press("f2")
            chat.app.screen.query_one(f"#{field}", Input).value = value
            await chat.press("ctrl+s")
            assert reported in str(chat.app.screen.query_one("#wrong").render())
            await chat.press("escape")
        assert chat.app.chat.settings == {}


async def test_another_model_continues_with_the_chat(opened: Opened) -> None:
    first, second = FakeModel(), FakeModel("A bear.")
    second.name = "other"
    async with opened(first, second) as chat:
        await chat.say("Hi")
        await chat.press("f4")
        await chat.until(lambda: chat.app.screen.query_one(OptionList).option_count)
        await chat.press("enter")
        await chat.settle()
        assert first.closed
        await chat.say("And?")
        assert chat.shown() == ["Hi", ANSWER, "And?", "A bear."]
        assert [message["content"] for message in second.chats[0].messages][:2] == ["Hi", ANSWER]


async def test_a_failed_load_keeps_the_previous_model(opened: Opened) -> None:
    again = FakeModel("Back again.")
    async with opened(FakeModel(), OSError("no room"), again) as chat:
        await chat.say("/model other")
        await chat.settle()
        assert any("no room" in notice for notice in chat.notices())
        await chat.say("Hi")
        assert chat.shown() == ["Hi", "Back again."]
        assert again.loaded_with == {"model": "tiny"}


async def test_an_unknown_model_name_starts_no_loading(opened: Opened) -> None:
    model = FakeModel()
    async with opened(model, missing=["mistyped"]) as chat:
        await chat.say("/model mistyped")
        await chat.settle()
        assert any("mistyped: no such model" in notice for notice in chat.notices())
        assert not model.closed
        await chat.say("Hi")
        assert chat.shown() == ["Hi", ANSWER]
        assert "fake" in str(chat.views()[1].query_one(".head").render())


async def test_a_past_chat_is_found_by_its_text(opened: Opened, tmp_path: Path) -> None:
    with ChatStore(tmp_path / "chats.sqlite") as store:
        for output, completion in (("Of foxes", "They are red."), ("Of bears", "They are brown.")):
            made = store.new_chat("tiny").id
            user_message = store.add_message(made, None, "user", output)
            store.add_message(made, user_message.id, "assistant", completion)
    async with opened() as chat:
        await chat.press("ctrl+f")
        options = chat.app.screen.query_one(OptionList)
        await chat.until(lambda: options.option_count == 2)
        await chat.press(*"RED")
        await chat.until(lambda: options.option_count == 1)
        await chat.press("enter")
        await chat.settle()
        assert chat.shown() == ["Of foxes", "They are red."]
        assert chat.screen.focused is chat.screen.input
        await chat.say("More")
        assert [one.text for one in chat.messages()] == [
            "Of foxes",
            "They are red.",
            "More",
            ANSWER,
        ]


async def test_a_new_chat_begins_and_the_old_one_is_saved(opened: Opened) -> None:
    async with opened() as chat:
        await chat.say("One")
        await chat.press("ctrl+n")
        assert chat.shown() == []
        await chat.say("Two")
        assert [chat.title for chat in chat.stored()] == ["Two", "One"]


async def test_an_unknown_command_is_cleared_and_the_nearest_named(opened: Opened) -> None:
    model = FakeModel()
    async with opened(model) as chat:
        await chat.say("/sytem x")
        assert any(notice == "/sytem: no such command; did you mean /system?" for notice in chat.notices())
        assert model.prompts == []
        assert chat.screen.input.text == ""


@pytest.mark.parametrize("key", ["f1", "f2", "f3", "f4"])
async def test_a_notice_covers_no_dialog(opened: Opened, key: str) -> None:
    async with opened(size=(80, 24), notices_shown=True) as chat:
        await chat.press("f5")
        await chat.until(lambda: any(toast.region for toast in chat.screen.query("Toast")))
        await chat.press(key)
        await chat.settle()
        assert [toast for toast in chat.app.screen.query("Toast") if toast.region] == []
        await chat.press("escape")
        await chat.until(lambda: chat.app.screen is chat.screen)


@pytest.mark.parametrize("word", ["/exit", "/bye", "/quit"])
async def test_a_word_leaves_the_chat(opened: Opened, word: str) -> None:
    async with opened() as chat:
        await chat.say(word, wait=False)
        await chat.until(lambda: chat.app.at_rest)


@pytest.mark.parametrize("size", [(90, 30), (60, 16)])
async def test_a_notice_keeps_the_input_line_free_and_closes_with_esc(
    opened: Opened, size: tuple[int, int]
) -> None:
    async with opened(size=size, missing=["mistyped"], notices_shown=True) as chat:
        await chat.say("/model mistyped")
        toasts = chat.screen.query("Toast")
        await chat.until(lambda: toasts and toasts.last().region.height)
        assert toasts.last().region.bottom <= chat.screen.input.region.y
        await chat.press("escape")
        await chat.until(lambda: not chat.screen.query("Toast"))
        assert chat.notices() == []


async def test_the_memory_panel_shows_each_device_and_kind(opened: Opened) -> None:
    async with opened() as chat:
        await chat.press("f6")
        panel = chat.screen.query_one("#memory")
        assert panel.display
        text = str(panel.render())
        assert "GPU  4.0 MiB of 8.0 MiB" in text
        assert "CPU  8.0 MiB of 16.0 MiB" in text
        assert "draft" in text
        assert "disk" not in text
        assert "a warning of loading" in text
        await chat.press("f6")
        assert not panel.display


async def test_the_bars_of_the_memory_panel_have_true_proportions(opened: Opened) -> None:
    model = FakeModel()
    model.plan = LargePlan()
    async with opened(model, size=(80, 24)) as chat:
        await chat.press("f6")
        panel = chat.screen.query_one("#memory")
        columns = panel.content_size.width - 20
        lines = [line for line in str(panel.render()).split("\n") if line.endswith("iB")]
        assert "GPU  6.5 GiB of 8.0 GiB" in lines
        bars = [line for line in lines if line.startswith(("weights", "KV cache", "draft", "other", "free"))]
        assert [line[-11:].strip() for line in bars] == [
            *("4.0 GiB", "1.0 GiB", "512.0 MiB", "1.0 GiB", "1.5 GiB"),
            *("3.0 GiB", "29.0 GiB"),
        ]
        shares = [4 / 8, 1 / 8, 0.5 / 8, 1 / 8, 1.5 / 8, 3 / 32, 29 / 32]
        for line, share in zip(bars, shares, strict=True):
            eighths = sum(" ▏▎▍▌▋▊▉█".index(mark) for mark in line[9:-11].rstrip())
            assert eighths == round(8 * columns * share)


@pytest.mark.parametrize(
    ("share", "shown"),
    [(0, ""), (1e-9, "▏"), (1 / 32, "▏"), (4 / 32, "▌"), (8 / 32, "█"), (15 / 32, "█▉"), (1, "████")],
)
def test_a_bar_has_eighths_of_a_column(share: float, shown: str) -> None:
    assert bar(share, 4) == shown


async def test_f7_toggles_dark_and_light(opened: Opened) -> None:
    async with opened() as chat:
        assert chat.app.current_theme.dark
        await chat.press("f7")
        assert not chat.app.current_theme.dark
        await chat.press("f7")
        assert chat.app.current_theme.dark


async def test_load_warnings_are_shown_until_a_message_is_sent(opened: Opened) -> None:
    async with opened() as chat:
        warning = chat.screen.query_one("#note")
        assert str(warning.render()) == "a warning of loading"
        await chat.say("Hi")
        assert not warning.display
