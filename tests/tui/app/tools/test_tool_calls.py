"""Tool calls in the chat: the question, the result that the model reads, and what is stored."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edgeinfer import Model
from edgeinfer.history.store import ChatStore
from edgeinfer.tokenizer import Tokenizer
from edgeinfer_tui.app.tools.call_screen import CallScreen
from tests.conftest import needs
from tests.edgeinfer.fake_engine import END, FIRST_BYTE, FakeEngine, model_on
from tests.random_models import CHAT_TEMPLATE, VOCABULARY, vocabulary_metadata
from tests.tui.app.conftest import Chat, Opened

pytestmark = [pytest.mark.anyio, needs("mcp")]

SERVER = Path(__file__).parents[3] / "edgeinfer" / "tool_servers" / "plain_server.py"
TEMPLATE = "{{ tools | length if tools else '' }}" + CHAT_TEMPLATE
CALL = '<tool_call>{"name": "test__NAME", "arguments": {"a": 2, "b": 3}}</tool_call>'


def calling(tool: str = "add") -> Model:
    """A model that calls a tool, and then responds with what it returned."""
    tokenizer = Tokenizer.from_metadata(vocabulary_metadata())

    def logits(ids: list[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
        prompt, _, response = tokenizer.decode(ids, special=True).rpartition("<|assistant|>")
        request = prompt.rpartition("<|user|>")[2]
        result = request.rpartition("<|tool|>")[2].removesuffix("</s>") if "<|tool|>" in request else ""
        whole = f"It is {result}." if result else "Now. " + CALL.replace("NAME", tool)
        left = whole.encode()[len(response.encode()) :]
        logits = np.zeros(VOCABULARY, np.float32)
        logits[FIRST_BYTE + left[0] if left else END] = 30.0
        return logits

    return model_on(FakeEngine(logits, 2048), TEMPLATE)


@pytest.fixture
def with_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Write a settings file with the small server."""

    def write(*allowed: str) -> None:
        file = tmp_path / "config.toml"
        lines = [
            "[mcp.test]",
            f"command = {json.dumps(sys.executable)}",
            f"args = [{json.dumps(str(SERVER))}]",
        ]
        file.write_text("\n".join([*lines, f"allow = {json.dumps(allowed)}"]), encoding="utf-8")
        monkeypatch.setenv("EDGEINFER_CONFIG", str(file))

    return write


async def question(chat: Chat) -> CallScreen:
    await chat.until(lambda: isinstance(chat.app.screen, CallScreen) and chat.app.screen.focused)
    screen = chat.app.screen
    assert isinstance(screen, CallScreen)
    return screen


async def test_a_confirmed_call_is_run_and_its_result_read(
    opened: Opened, with_tools: Callable[..., None]
) -> None:
    with_tools()
    async with opened(calling()) as chat:
        await chat.say("2 + 3?", wait=False)
        screen = await question(chat)
        assert screen.focused is screen.query_one("#no")
        assert "test__add" in str(screen.query_one(".heading").render())
        await chat.press("right", "right", "enter")
        await chat.settle()
        assert chat.shown()[-2:] == ["test__add: 5", "It is 5."]
        stored = chat.messages()
        assert [one.role for one in stored] == ["user", "assistant", "tool", "assistant"]
        assert stored[1].text.startswith('Now.\n<tool_call>\n{"name": "test__add"')
        assert {one.state for one in stored} == {"whole"}
        await chat.say("Again?", wait=False)
        await question(chat)
        await chat.press("escape")
        await chat.settle()
        assert chat.shown()[-1] == "It is error: the user refused this call."


@pytest.mark.slow
async def test_an_allowed_tool_is_called_without_a_question(
    opened: Opened, with_tools: Callable[..., None]
) -> None:
    with_tools("add")
    async with opened(calling()) as chat:
        await chat.say("2 + 3?")
        assert chat.shown()[-1] == "It is 5."
        await chat.press("ctrl+r")
        await chat.settle()
        assert chat.shown()[-2:] == ["test__add: 5", "It is 5."]
        assert len(chat.messages()) == 4


@pytest.mark.slow
async def test_esc_stops_a_call(opened: Opened, with_tools: Callable[..., None]) -> None:
    with_tools("wait")
    async with opened(calling("wait")) as chat:
        await chat.say("Wait", wait=False)
        await chat.until(lambda: chat.app.chat.tools.is_calling)
        await chat.press("escape")
        await chat.settle()
        assert [one.role for one in chat.messages()] == ["user", "assistant"]
        await chat.say("Wait", wait=False)
        await chat.until(lambda: chat.app.chat.tools.is_calling)
        await chat.press("escape")
        await chat.settle()


@pytest.mark.slow
async def test_without_tools_the_model_is_offered_none(
    opened: Opened, with_tools: Callable[..., None]
) -> None:
    with_tools()
    async with opened(calling(), mcp=False) as chat:
        await chat.say("2 + 3?")
        assert len(chat.shown()) == 2
        assert [one.role for one in chat.messages()] == ["user", "assistant"]


async def test_a_chat_with_results_is_continued(
    opened: Opened, with_tools: Callable[..., None], tmp_path: Path
) -> None:
    with_tools("add")
    async with opened(calling()) as chat:
        await chat.say("2 + 3?")
    with ChatStore(tmp_path / "chats.sqlite") as store:
        (stored,) = store.chats()
    async with opened(calling(), stored=stored) as chat:
        await chat.press("ctrl+r")
        await chat.settle()
        assert chat.shown()[-1] == "It is 5."
        await chat.say("And now?")
        assert [one.role for one in chat.messages()][4:] == ["user", "assistant", "tool", "assistant"]


@pytest.mark.slow
async def test_a_server_that_fails_is_one_notice(
    opened: Opened, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "config.toml"
    file.write_text('[mcp.gone]\ncommand = "/no/such/program"\n', encoding="utf-8")
    monkeypatch.setenv("EDGEINFER_CONFIG", str(file))
    async with opened() as chat:
        await chat.until(lambda: any("tool server gone" in line for line in chat.notices()))
        await chat.say("Hello")
        assert chat.shown()[-1] == "There was a fox."
