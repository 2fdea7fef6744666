"""Tools of the page in headless Chromium: each call is confirmed, and its result goes back to the model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.conftest import needs

pytest.importorskip("starlette")
pytest.importorskip("httpx")

from edgeinfer import Model
from edgeinfer.history.store import ChatStore
from edgeinfer.tokenizer import Tokenizer
from edgeinfer.tool_servers.client import ToolServers
from tests.edgeinfer.fake_engine import END, FIRST_BYTE, FakeEngine, model_on
from tests.edgeinfer.serving.http_client import TOOL_TEMPLATE, fake
from tests.edgeinfer.serving.page.conftest import OpenPage
from tests.random_models import VOCABULARY, vocabulary_metadata

pytestmark = needs("mcp")

CALL = '<tool_call>{"name": "test__add", "arguments": {"a": 2, "b": 3}}</tool_call>'
DONE = "article.assistant[aria-busy=false]"


def calculating() -> Model:
    """A model that calls a tool, and then responds with what it returned."""

    tokenizer = Tokenizer.from_metadata(vocabulary_metadata())

    def logits(ids: list[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
        prompt, _, response = tokenizer.decode(ids, special=True).rpartition("<|assistant|>")
        result = prompt.rpartition("<|tool|>")[2].removesuffix("</s>") if "<|tool|>" in prompt else ""
        whole = f"It is {result}." if result else CALL
        left = whole.encode()[len(response.encode()) :]
        logits = np.zeros(VOCABULARY, np.float32)
        logits[FIRST_BYTE + left[0] if left else END] = 30.0
        return logits

    return model_on(FakeEngine(logits, 4096), TOOL_TEMPLATE)


def ask(tab: Any, text: str = "2 + 3?") -> None:
    tab.fill("#message", text)
    tab.press("#message", "Enter")


def test_a_confirmed_call_is_run_and_its_result_read(
    open_page: OpenPage, tools: ToolServers, tmp_path: Path
) -> None:
    tab = open_page(calculating(), tools=tools)
    ask(tab)
    tab.wait_for_selector("dialog.call")
    assert "Run test__add?" in tab.inner_text("dialog h2")
    assert '"a": 2' in tab.inner_text("dialog pre")
    assert tab.evaluate("document.activeElement.innerText") == "Don't run"
    tab.click("dialog button:text-is('Run')")
    tab.wait_for_selector(f"article.tool + {DONE}:has-text('It is 5')")
    assert tab.inner_text(".calls li") == "tool call: test__add(a=2, b=3)"
    tab.click("article.tool summary")
    assert tab.inner_text("article.tool pre") == "5"
    tab.wait_for_selector("#send:visible")
    with ChatStore(tmp_path / "chats.sqlite") as store:
        messages = store.branch(store.chats()[0])
    assert [message.role for message in messages] == ["user", "assistant", "tool", "assistant"]
    assert messages[2].text == '[{"name": "test__add", "content": "5"}]'
    tab.reload()
    tab.wait_for_selector("article.tool")
    assert tab.locator("article").count() == 4


def test_a_refused_call_is_not_run_and_the_model_reads_so(open_page: OpenPage, tools: ToolServers) -> None:
    tab = open_page(calculating(), tools=tools)
    ask(tab)
    tab.wait_for_selector("dialog.call")
    tab.keyboard.press("Escape")
    tab.wait_for_selector(f"{DONE}:has-text('the user refused this call')")


def test_a_tool_can_be_allowed_until_the_page_is_left(open_page: OpenPage, tools: ToolServers) -> None:
    tab = open_page(calculating(), tools=tools)
    ask(tab)
    tab.click("dialog button:has-text('Always')")
    tab.wait_for_selector(f"{DONE}:has-text('It is 5')")
    tab.keyboard.press("Alt+Shift+N")
    tab.wait_for_selector(".welcome")
    ask(tab)
    tab.wait_for_selector(f"{DONE}:has-text('It is 5')")
    assert tab.locator("dialog").count() == 0


def test_a_template_without_tools_gets_none(open_page: OpenPage, tools: ToolServers) -> None:
    tab = open_page(fake("Hello."), tools=tools)
    ask(tab)
    tab.wait_for_selector(f"{DONE}:has-text('Hello.')")
    assert "this model's chat template has no tools" in tab.inner_text("#note")
