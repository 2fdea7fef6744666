"""The page in headless Chromium: a chat with the built-in model, branches, files, hostile text, access."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx")

import edgeinfer
from edgeinfer import Model
from edgeinfer.history.store import ChatStore
from tests.edgeinfer.fake_engine import FakeEngine, model_on, seeded_logits
from tests.edgeinfer.serving.http_client import fake
from tests.edgeinfer.serving.page.conftest import OpenPage

DONE = "article.assistant[aria-busy=false]"
HOSTILE = """<script>window.hacked = 1</script><img src=x onerror="window.hacked = 1">

**bold** `<b>code</b>` [bad](javascript:window.hacked=1) [good](https://example.com/a?b)
![picture](https://example.com/p.png) <a href="https://example.com">html</a>

```html
<script>window.hacked = 1</script>
```
- <iframe src="https://example.com"></iframe>
"""
DROP = """([name, bytes]) => {
    const files = new DataTransfer();
    files.items.add(new File([new Uint8Array(bytes)], name));
    const event = { dataTransfer: files, bubbles: true, cancelable: true };
    document.body.dispatchEvent(new DragEvent("drop", event));
}"""


@pytest.fixture(scope="module")
def tiny() -> Iterator[Model]:
    with edgeinfer.load("tiny", device="cpu", threads=1, draft=None, context=512) as model:
        yield model


def send(tab: Any, text: str) -> None:
    """Type a message and wait for its response."""
    tab.fill("#message", text)
    tab.press("#message", "Enter")
    tab.wait_for_selector(f"article.user:has-text('{text[:20]}') + {DONE}")


def written(tab: Any) -> list[str]:
    return [str(text) for text in tab.locator("article.user .written").all_inner_texts()]


def slow_model(begun: threading.Event, goes_on: threading.Event) -> Model:
    """A model that sets `begun` after some tokens, and then waits for `goes_on`."""

    def logits(ids: list[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
        if len(ids) > 80:
            begun.set()
            goes_on.wait(30)
        return seeded_logits(ids)

    return model_on(FakeEngine(logits, 512))


def test_a_prompt_gets_the_streamed_response_of_the_built_in_model(
    open_page: OpenPage, tiny: Model, tmp_path: Path
) -> None:
    tab = open_page(tiny)
    assert "CPU" in tab.inner_text("#plan")
    send(tab, "Tell me a story about a fox.")
    response = tab.inner_text("article.assistant .markdown")
    assert len(response) > 20
    assert "tokens/s" in tab.inner_text("#note")
    assert response.split()[0] in tab.inner_text("#live")
    tab.wait_for_selector("#chats .chat[aria-current]")
    with ChatStore(tmp_path / "chats.sqlite") as store:
        (chat,) = store.chats()
        messages = store.branch(chat)
    assert [(one.role, one.state) for one in messages] == [("user", "whole"), ("assistant", "whole")]
    assert messages[1].text.split() == response.split()
    tab.reload()
    tab.wait_for_selector(DONE)
    assert tab.inner_text("article.assistant .markdown") == response


def test_messages_are_edited_and_regenerated_as_branches(open_page: OpenPage, tiny: Model) -> None:
    tab = open_page(tiny)
    send(tab, "First question?")
    send(tab, "Second question?")
    tab.click("article.assistant:last-child .again")
    tab.wait_for_selector(f"{DONE} .versions:has-text('2/2')")
    tab.locator("article.user .edit").first.click()
    assert tab.input_value("#message") == "First question?"
    send(tab, "Other question?")
    assert written(tab) == ["Other question?"]
    tab.click("article.user .versions button[aria-label='Previous version']")
    tab.wait_for_selector("article.user:has-text('Second question?')")
    assert written(tab) == ["First question?", "Second question?"]
    assert tab.get_attribute("article.user .versions", "aria-label") == "version 1 of 2"
    tab.reload()
    tab.wait_for_selector(DONE)
    assert written(tab) == ["First question?", "Second question?"]


def test_a_dropped_text_file_becomes_part_of_the_message(open_page: OpenPage, tmp_path: Path) -> None:
    tab = open_page(fake())
    tab.evaluate(DROP, ["notes.txt", list(b"# Foxes\n```\n")])
    tab.wait_for_selector("#files li:has-text('notes.txt')")
    assert tab.input_value("#message") == "@notes.txt "
    tab.evaluate(DROP, ["picture.png", [0x89, 0x50, 0xFF, 0]])
    tab.wait_for_selector("#alert:has-text('picture.png: no text in UTF-8')")
    tab.locator("#message").press_sequentially("Summarize it.")
    tab.press("#message", "Enter")
    tab.wait_for_selector(DONE)
    assert written(tab) == ["@notes.txt Summarize it."]
    assert "Attached: notes.txt" in tab.inner_text("article.user summary")
    with ChatStore(tmp_path / "chats.sqlite") as store:
        (message, _) = store.branch(store.chats()[0])
    assert message.text == "@notes.txt Summarize it.\n\nnotes.txt:\n````txt\n# Foxes\n```\n````"


def test_html_of_a_model_stays_text(open_page: OpenPage) -> None:
    tab = open_page(fake(HOSTILE, context=2048))
    send(tab, "<img src=x onerror=window.hacked=1>")
    assert tab.evaluate("window.hacked") is None
    forbidden = "#transcript :is(script, img, iframe, object, svg, [onerror], [style])"
    assert tab.locator(forbidden).count() == 0
    text = tab.inner_text("article.assistant .markdown")
    for part in ("<script>window.hacked = 1</script>", "<img src=x onerror=", "<iframe src=", "javascript:"):
        assert part in text
    links = tab.eval_on_selector_all(
        "#transcript a", "(all) => all.map((one) => [one.getAttribute('href'), one.rel])"
    )
    assert {address for address, _ in links} == {
        "https://example.com/a?b",
        "https://example.com/p.png",
        "https://example.com/",
    }
    assert {rel for _, rel in links} == {"noopener noreferrer"}
    assert "good (example.com/a)" in text
    assert tab.inner_text("article.user .written") == "<img src=x onerror=window.hacked=1>"
    assert tab.inner_text("article.assistant strong") == "bold"
    assert tab.inner_text("article.assistant figure code") == "<script>window.hacked = 1</script>"


def test_reasoning_is_folded_and_tool_calls_are_shown(open_page: OpenPage, tmp_path: Path) -> None:
    tab = open_page(fake("<think>A fox, <b>yes</b>.</think>It is a fox.", context=2048))
    send(tab, "What is it?")
    assert tab.inner_text("article.assistant summary") == "Reasoning (3 words)"
    assert not tab.is_visible(".reasoning-text")
    tab.click("article.assistant summary")
    assert tab.inner_text(".reasoning-text") == "A fox, <b>yes</b>."
    call = '<tool_call>\n{"name": "look", "arguments": {"at": "<i>"}}\n</tool_call>'
    with ChatStore(tmp_path / "chats.sqlite") as store:
        chat = store.new_chat("fake")
        first = store.add_message(chat.id, None, "user", "Look")
        store.add_message(chat.id, first.id, "assistant", f"Now.\n{call}")
    tab.goto(f"{tab.url.partition('#')[0]}#chat={chat.id}")
    tab.reload()
    assert tab.inner_text(".calls li") == 'tool call: look(at="<i>")'


def test_esc_stops_a_response_and_its_text_is_kept(open_page: OpenPage, tmp_path: Path) -> None:
    begun, goes_on = threading.Event(), threading.Event()
    tab = open_page(slow_model(begun, goes_on))
    tab.fill("#message", "Go on")
    tab.press("#message", "Enter")
    assert begun.wait(20)
    tab.wait_for_selector("article.assistant .markdown > *")
    assert tab.is_visible("#stop")
    tab.keyboard.press("Escape")
    tab.wait_for_selector("article.assistant .state:has-text('stopped')")
    goes_on.set()
    tab.wait_for_selector("#send:visible")
    with ChatStore(tmp_path / "chats.sqlite") as store:
        (_, response) = store.branch(store.chats()[0])
    assert response.state == "stopped"
    assert response.text


def test_a_page_that_is_left_keeps_the_text_so_far(open_page: OpenPage, tmp_path: Path) -> None:
    begun, goes_on = threading.Event(), threading.Event()
    tab = open_page(slow_model(begun, goes_on))
    tab.fill("#message", "Go on")
    tab.press("#message", "Enter")
    assert begun.wait(20)
    tab.wait_for_selector("article.assistant .markdown > *")
    tab.reload()
    tab.wait_for_selector("article.assistant .state:has-text('stopped')")
    goes_on.set()
    with ChatStore(tmp_path / "chats.sqlite") as store:
        (_, response) = store.branch(store.chats()[0])
    assert response.text


def test_what_is_unfolded_stays_so_and_the_focus_is_not_lost(open_page: OpenPage) -> None:
    tab = open_page(fake("<think>A fox.</think>It is a fox.", context=2048))
    send(tab, "What is it?")
    tab.click("article.assistant summary")
    send(tab, "And this?")
    assert tab.locator(".reasoning-text").first.is_visible()
    tab.click("article.assistant:last-child .again")
    tab.wait_for_selector(f"{DONE} .versions:has-text('2/2')")
    assert tab.evaluate("document.activeElement.id") == "message"


def test_chats_are_renamed_exported_searched_and_deleted(open_page: OpenPage) -> None:
    tab = open_page(fake())
    send(tab, "Where is it?")
    menu = "#chats li .menu"
    tab.click(f"{menu} summary")
    tab.click(f"{menu} button:has-text('Rename')")
    tab.fill("#dialog-text", "foxes")
    tab.keyboard.press("Enter")
    tab.wait_for_selector("#chats .name:has-text('foxes')")
    assert tab.inner_text("#title") == "foxes"
    tab.click(f"{menu} summary")
    with tab.expect_download() as download:
        tab.click(f"{menu} button:has-text('Markdown')")
    assert "The fox is here." in Path(download.value.path()).read_text("utf-8")
    tab.fill("#search", "no such text")
    tab.wait_for_selector("#no-chats:has-text('Found in no chat.')")
    tab.fill("#search", "the FOX")
    tab.wait_for_selector("#chats .dim:has-text('The fox is here.')")
    tab.click(f"{menu} summary")
    tab.click(f"{menu} button:has-text('Delete')")
    tab.click("dialog button:has-text('Delete')")
    tab.wait_for_selector(".welcome")
    assert tab.inner_text("#title") == "New chat"


def test_the_key_is_typed_into_the_page(open_page: OpenPage) -> None:
    tab = open_page(fake(), key="secret")
    for key, text in (("wrong", "needs its key"), ("secret", "refused this key")):
        tab.wait_for_selector(f"dialog:has-text('{text}')")
        tab.fill("#dialog-key", key)
        tab.keyboard.press("Enter")
    tab.wait_for_selector(".welcome")
    send(tab, "Where is it?")
    assert tab.evaluate("sessionStorage.getItem('edgeinfer-key')") == "secret"
    assert "secret" not in tab.url
    assert tab.evaluate("localStorage.length") == 0


def test_a_key_in_the_address_is_taken_out_of_it(open_page: OpenPage) -> None:
    tab = open_page(fake(), key="secret")
    tab.wait_for_selector("dialog")
    address = tab.url
    tab.goto("about:blank")
    tab.goto(f"{address}#key=secret")
    tab.wait_for_selector(".welcome")
    assert tab.locator("dialog").count() == 0
    assert "secret" not in tab.url
