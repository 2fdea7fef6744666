"""Tool calls of a response, and Markdown of both sides, on narrow and wide terminals."""

import pytest

from edgeinfer_tui.app.messages.markdown_text import CodeBlock, MarkdownText
from edgeinfer_tui.app.messages.message_parts import ToolCallsView, call_line, with_calls
from edgeinfer_tui.app.messages.message_view import MessageView
from tests.tui.app.conftest import Chat, Opened, PacedModel
from tests.tui.fake_library import FakeModel

pytestmark = pytest.mark.anyio

SIZES = [(80, 24), (120, 40), (200, 60)]
WEATHER = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Zürich", "days": 2}}\n</tool_call>'
TIME = '<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
RESPONSE = f"I look that up.\n\n{WEATHER}\n{TIME}"


def calls_of(view: MessageView) -> ToolCallsView:
    return view.query_one(ToolCallsView)


def picture(chat: Chat) -> str:
    """The text of the screen, from its SVG picture."""
    return chat.app.export_screenshot().replace("&#160;", " ")


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("size", SIZES)
async def test_tool_calls_are_shown_below_the_text(opened: Opened, size: tuple[int, int]) -> None:
    async with opened(FakeModel(RESPONSE), size=size) as chat:
        await chat.say("What is the weather?")
        view = chat.views()[1]
        calls = calls_of(view)
        assert str(calls.render()) == ('tool call: get_weather(city="Zürich", days=2)\ntool call: get_time()')
        assert view.query_one(MarkdownText).source == "I look that up."
        assert view.region.contains_region(calls.region)
        assert calls.region.height == 2
        shown = picture(chat)
        assert "get_weather" in shown
        assert "tool_call" not in shown
        assert chat.shown()[1] == RESPONSE


@pytest.mark.slow
async def test_a_call_that_is_not_complete_is_announced(opened: Opened) -> None:
    model = PacedModel(f"I see. {WEATHER}")
    async with opened(model) as chat:
        await chat.say("Hi", wait=False)
        model.allow(3)
        await chat.until(lambda: str(calls_of(chat.views()[-1]).render()) == "calls a tool ...")
        assert chat.views()[-1].query_one(MarkdownText).source == "I see."
        model.allow(40)
        await chat.settle()
        assert "get_weather" in str(calls_of(chat.views()[-1]).render())


@pytest.mark.slow
async def test_a_response_without_calls_has_no_such_part(opened: Opened) -> None:
    async with opened(FakeModel("Qwen writes `<tool_call>` before a call.")) as chat:
        await chat.say("Hi")
        assert not calls_of(chat.views()[1]).display


def test_a_call_is_one_line_of_text() -> None:
    text = '<tool_call>{"name": "f", "arguments": {"a": ["\\u001b[31m", null], "b": "%s"}}</tool_call>'
    reply, is_coming = with_calls(text % ("x" * 2000), ended=True)
    (call,) = reply.calls
    shown = call_line(call).plain
    assert not is_coming
    assert shown.startswith('tool call: f(a=["\\u001b[31m", null], b="xxx')
    assert shown.endswith("...)")
    assert len(shown) < 600


@pytest.mark.slow
@pytest.mark.default_cases(1)
@pytest.mark.parametrize("size", SIZES)
async def test_messages_of_the_user_are_markdown_too(opened: Opened, size: tuple[int, int]) -> None:
    message = "Is **this** right?\n\n```python\nprint(1)\n```"
    async with opened(size=size) as chat:
        await chat.say(message)
        view = chat.views()[0]
        assert [block.code for block in view.query(CodeBlock)] == ["print(1)"]
        assert "**" not in str(view.query_one("MarkdownParagraph").render())
        assert chat.shown()[0] == message
