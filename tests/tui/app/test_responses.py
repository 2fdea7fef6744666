"""How responses are shown and used: Markdown, code to copy, the mouse, long messages."""

import functools

import pytest
from textual.widgets.markdown import MarkdownBlock

from edgeinfer_tui.app.messages.markdown_text import CodeBlock, CopyLabel, MarkdownText
from edgeinfer_tui.app.messages.message_view import MAX_LINES
from edgeinfer_tui.app.model_status import status_text
from edgeinfer_tui.app.model_thread import Progress
from tests.tui.app.conftest import Chat, Opened, PacedModel
from tests.tui.fake_library import FakeModel

pytestmark = pytest.mark.anyio

CODE = 'Two:\n\n```python\nprint("fox")\n```\n\n```sh\necho bear\n```\n\nThat is all.'
DOCUMENT = """# Foxes

Some *text* with `code`
on two lines.\u2028And a third.

1. one
2. two
   - deeper
   - and
     ```sh
     ls
     ```
3. three

| a | b |
|---|---|
| 1 | 2 |
| 3 | 4 |

> quoted
> on

```python
def fox():

    return 1
```

---

    indented

Last
===

- [x] done

The end."""


def blocks_of(response: MarkdownText) -> list[tuple[str, str]]:
    return [
        (type(block).__name__, block.code if isinstance(block, CodeBlock) else str(block.render()))
        for block in response.query(MarkdownBlock)
    ]


def shows(chat: Chat, output: str) -> bool:
    return "".join(chat.shown()[1:]).startswith(output)


async def test_streamed_code_can_be_copied_block_by_block(opened: Opened) -> None:
    model = PacedModel(CODE)
    async with opened(model) as chat:
        await chat.say("Hi", wait=False)
        output = ""
        for word in CODE.split(" "):
            output = f"{output} {word}".lstrip(" ")
            model.allow(1)
            await chat.until(functools.partial(shows, chat, output))
        await chat.settle()
        blocks = list(chat.views()[1].query(CodeBlock))
        assert [(block.lexer, block.code.rstrip()) for block in blocks] == [
            ("python", 'print("fox")'),
            ("sh", "echo bear"),
        ]
        await chat.press("tab", "2")
        assert chat.app.clipboard.rstrip() == "echo bear"
        await chat.pilot.click(blocks[0].query_one(CopyLabel))
        assert chat.app.clipboard.rstrip() == 'print("fox")'
        await chat.press("c")
        assert chat.app.clipboard == CODE


@pytest.mark.default_cases(1)
@pytest.mark.parametrize(
    ("response", "code"),
    [
        ('{"name": "*Ada*",\n "at": ["```", 1]}', '{"name": "*Ada*",\n "at": ["```", 1]}'),
        ('[{"a": "_b_"}] is all.', '[{"a": "_b_"}]'),
        ('{ "cut": "*of', '{ "cut": "*of'),
        ("{}", "{}"),
        ("[1] says *so*.", None),
        ("{x} is a *set*.", None),
    ],
)
async def test_json_is_shown_unchanged(opened: Opened, response: str, code: str | None) -> None:
    model = PacedModel(response)
    async with opened(model) as chat:
        await chat.say("Hi", wait=False)
        model.allow(len(response))
        await chat.until(lambda: chat.views()[1].message.text == response)
        await chat.settle()
        text = chat.views()[1].query_one(MarkdownText)
        assert [block.code.rstrip("\n") for block in text.query(CodeBlock)] == ([code] if code else [])
        assert "is all." not in response or ("MarkdownParagraph", "is all.") in blocks_of(text)
        await chat.press("tab", "c")
        assert chat.app.clipboard == response


@pytest.mark.slow
async def test_html_in_a_response_is_shown_as_text(opened: Opened) -> None:
    async with opened(FakeModel("Use <b>bold</b> and \x1b[31mred.")) as chat:
        await chat.say("Hi")
        text = chat.views()[1].query_one("MarkdownParagraph").render()
        assert "<b>bold</b>" in str(text)
        assert "\x1b" not in str(text)


async def test_line_breaks_of_a_response_are_kept(opened: Opened) -> None:
    async with opened(FakeModel("One fox,\ntwo bears.")) as chat:
        await chat.say("Hi")
        assert str(chat.views()[1].query_one("MarkdownParagraph").render()) == "One fox,\ntwo bears."


async def test_clicks_regenerate_and_edit(opened: Opened) -> None:
    model = FakeModel()
    async with opened(model) as chat:
        await chat.say("Hi")
        await chat.click(1, "[again]")
        await chat.until(lambda: len(model.prompts) == 2)
        await chat.settle()
        assert "2/2" in str(chat.views()[1].query_one(".head").render())
        await chat.click(0, "[edit]")
        await chat.until(lambda: chat.screen.input.text == "Hi")


@pytest.mark.slow
async def test_a_long_message_is_truncated_until_unfolded(opened: Opened) -> None:
    async with opened() as chat:
        await chat.say("\n".join(f"line {number}" for number in range(100)))
        message, more = chat.views()[0].query_one(MarkdownText), chat.views()[0].query_one(".more")
        assert f"... {100 - MAX_LINES} more lines" in str(more.render())
        assert message.source.endswith(f"line {MAX_LINES - 1}")
        await chat.press("tab", "up", "t")
        await chat.until(lambda: message.source.endswith("line 99"))
        assert not more.display


@pytest.mark.slow
async def test_a_truncated_response_is_marked(opened: Opened) -> None:
    model = PacedModel()
    async with opened(model) as chat:
        await chat.say("Hi", wait=False)
        model.allow(1)
        await chat.until(lambda: chat.shown() == ["Hi", "There "])
        await chat.press("ctrl+c")
        model.allow(1)
        await chat.settle()
        assert "stopped" in str(chat.views()[1].query_one(".head").render())


async def test_ctrl_c_twice_quits(opened: Opened) -> None:
    async with opened() as chat:
        await chat.press("ctrl+c")
        assert "Ctrl-C once more leaves" in chat.notices()
        await chat.press("ctrl+c")
        await chat.until(lambda: chat.app.at_rest)


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, 3, 17])
async def test_streamed_markdown_gives_the_same_blocks(opened: Opened, step: int) -> None:
    async with opened(FakeModel(DOCUMENT), FakeModel(DOCUMENT)) as chat:
        await chat.say("Hi")
        response = chat.views()[1].query_one(MarkdownText)
        whole = blocks_of(response)
        assert len(whole) == 20
        await response.show("")
        for end in range(step, len(DOCUMENT) + step, step):
            await response.show(DOCUMENT[:end], ended=end >= len(DOCUMENT))
        assert blocks_of(response) == whole
        await response.show("No.")
        assert response.source == "No."


def test_progress_reports_the_remaining_time() -> None:
    progress = Progress("reading the prompt", done=0, total=0)
    assert progress.line() == "reading the prompt ..."
    progress.done, progress.total = 25, 100
    progress.started -= 10
    assert progress.line() == "reading the prompt 25/100 (25%), 30 s left"


def test_the_status_line_drops_what_does_not_fit() -> None:
    tail = ["Esc stops"]
    assert status_text(60, 512, 1024, None, tail) == "[####....] 512/1024 tokens · Esc stops"
    assert status_text(30, 512, 1024, None, tail) == "512/1024 tokens · Esc stops"
    assert status_text(20, 512, 1024, None, tail) == "512/1024 tokens"
    assert status_text(60, None, None, None) == "no model yet"
    assert status_text(60, 512, 0, None) == "512 tokens"
