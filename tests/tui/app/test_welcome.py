"""What the chat shows before the first message, and the width of messages."""

import threading

import pytest
from textual.widgets import OptionList

from edgeinfer_tui.app.model_status import where_it_runs
from edgeinfer_tui.app.welcome import PROMPTS, Welcome
from tests.tui.app.conftest import Chat, Opened
from tests.tui.fake_library import ANSWER, FakeItem, FakeModel, FakePlan

pytestmark = pytest.mark.anyio

SIZES = [(80, 24), (120, 40), (200, 60)]


def welcome(chat: Chat) -> Welcome:
    return chat.screen.query_one(Welcome)


def welcome_text(chat: Chat) -> str:
    return "\n".join(str(part.render()) for part in welcome(chat).query("Static"))


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("size", SIZES)
async def test_an_empty_chat_shows_its_model_prompts_and_keys_until_the_first_message(
    opened: Opened, size: tuple[int, int]
) -> None:
    async with opened(size=size) as chat:
        shown = welcome_text(chat)
        for line in ("Model          fake", "Size on disk   5.0 GiB", "Context        1,024 tokens"):
            assert line in shown
        assert "split: 33 % of the weights on the GPU" in shown
        assert "F1 /help       all keys and commands" in shown
        assert welcome(chat).max_scroll_y == 0
        room = welcome(chat).region
        assert all(room.contains_region(part.region) for part in welcome(chat).children)
        await chat.say("Hi")
        assert not welcome(chat).region
        assert chat.shown() == ["Hi", ANSWER]
        await chat.press("ctrl+n")
        assert welcome(chat).region


@pytest.mark.slow
async def test_a_prompt_is_selected_by_key(opened: Opened) -> None:
    model = FakeModel()
    async with opened(model) as chat:
        assert welcome(chat).prompts.highlighted is None
        await chat.press("tab", "down", "enter")
        assert chat.screen.input.text == PROMPTS[1]
        assert chat.screen.input.has_focus
        assert model.prompts == []
        await chat.press("enter")
        await chat.settle()
        assert chat.shown() == [PROMPTS[1], ANSWER]


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("size", SIZES)
async def test_a_prompt_is_selected_by_a_click(opened: Opened, size: tuple[int, int]) -> None:
    async with opened(size=size) as chat:
        await chat.pilot.click(welcome(chat).query_one(OptionList), offset=(3, 2))
        await chat.until(lambda: chat.screen.input.text == PROMPTS[2])
        assert chat.screen.input.has_focus


async def test_letters_on_a_prompt_are_typed_and_escape_goes_back(opened: Opened) -> None:
    async with opened() as chat:
        await chat.press("up")
        assert welcome(chat).prompts.has_focus
        assert "Enter takes one" in str(chat.screen.query_one("#status").render())
        await chat.press("H", "i")
        assert chat.screen.input.text == "Hi"
        await chat.press("ctrl+u", "tab", "escape")
        assert chat.screen.input.has_focus


async def test_a_model_that_is_being_loaded_is_named(opened: Opened) -> None:
    started = threading.Event()
    async with opened(load_when=started) as chat:
        assert "Model          tiny" in welcome_text(chat)
        assert "(loading ...)" in welcome_text(chat)
        started.set()
        await chat.settle()
        assert "loading" not in welcome_text(chat)


async def test_the_name_of_a_model_is_text(opened: Opened) -> None:
    model = FakeModel()
    model.name = "[red]a[/] \x1b[31mb"
    async with opened(model) as chat:
        assert "[red]a[/] " in welcome_text(chat)
        assert "\x1b" not in welcome_text(chat)


@pytest.mark.parametrize(
    ("gpu", "cpu", "shown"),
    [(3, 0, "GPU"), (0, 3, "CPU"), (1, 999, "GPU and CPU, split: 1 % of the weights on the GPU")],
)
def test_where_a_model_runs_is_where_its_layers_are(gpu: int, cpu: int, shown: str) -> None:
    class Plan(FakePlan):
        items = (
            FakeItem("layer 0 attention", "gpu", gpu),
            FakeItem("layer 0 feed-forward", "cpu", cpu),
            FakeItem("layer 0 keys and values", "gpu", 7),
            FakeItem("embedding", "disk", 7),
        )

    assert where_it_runs(Plan()) == shown
    assert where_it_runs(None) == "another engine decides"


@pytest.mark.default_cases(2)
@pytest.mark.parametrize(("size", "width"), [((80, 24), 77), ((120, 40), 83), ((200, 60), 100)])
async def test_messages_have_at_most_a_hundred_columns(
    opened: Opened, size: tuple[int, int], width: int
) -> None:
    async with opened(FakeModel("word " * 100), size=size) as chat:
        await chat.say("Hi")
        assert [view.region.width for view in chat.views()] == [width, width]
