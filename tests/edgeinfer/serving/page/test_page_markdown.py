"""Markdown on the page: blocks become nodes, also piece by piece, and hostile input stays text."""

import json
from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx")

from tests.edgeinfer.serving.http_client import fake
from tests.edgeinfer.serving.page.conftest import OpenPage

TEXT = """# Head *one*
A paragraph with **bold**, `code` and ~~old~~ text
in two lines.

1. One
   - Two
   - Three

     More of three
2. Four
- [ ] other list
> A quotation
> - with a list

| a | b \\| c |
|:--|--:|
| 1 | `x` |

~~~js
let x = "```";
~~~
***
snake_case_name and 2 * 3 * 4, \\*no mark\\*, https://example.com/a_(b)?c=d.
"""
EXPECTED = [
    ("h3", "Head one"),
    ("h3 em", "one"),
    ("p > strong", "bold"),
    ("p > del", "old"),
    ("ol > li > ul > li", "Two"),
    ("ol > li:nth-child(2)", "Four"),
    ("blockquote ul li", "with a list"),
    ("th:nth-child(2)", "b | c"),
    ("td code", "x"),
    ("figure code", 'let x = "```";'),
    ("figure figcaption span", "js"),
    ("p > a", "https://example.com/a_(b)?c=d"),
]
HOSTILE = [
    "*" * 20_000,
    "**a " * 3_000,
    "_a" * 5_000,
    "`" * 20_001,
    "[" * 20_000,
    "[a](" * 5_000,
    "![" * 5_000,
    "> " * 5_000 + "x",
    "- " * 5_000 + "x",
    "\n".join("  " * depth + "- x" for depth in range(300)),
    "|" * 10_000 + "\n" + "|-" * 5_000,
    "#" * 10_000,
    "~" * 9_999 + "\n",
    "\\" * 9_999,
    "http://" * 3_000,
    "<" * 9_999 + "script>",
    "1. " + "x " * 20_000,
    "\u202e\u0000\u2028[a](http://[)",
]
SHOW = """async (text) => {
    const { MarkdownView } = await import("/page/static/chat/markdown.js");
    const node = document.createElement("div");
    node.className = "markdown";
    document.getElementById("transcript").replaceChildren(node);
    new MarkdownView(node).show(text);
    return node.textContent.length;
}"""
GROW = """async (text) => {
    const { MarkdownView } = await import("/page/static/chat/markdown.js");
    const [whole, grown] = [document.createElement("div"), document.createElement("div")];
    new MarkdownView(whole).show(text);
    const view = new MarkdownView(grown);
    for (let end = 1; end <= text.length; end++) view.show(text.slice(0, end));
    return [whole.innerHTML, grown.innerHTML];
}"""


def shown(tab: Any, selector: str) -> str:
    return str(tab.inner_text(f".markdown {selector} >> nth=0")).strip()


@pytest.fixture(scope="module")
def tab(open_pages: OpenPage) -> Any:
    """One tab for all texts: each replaces the one before it."""
    return open_pages(fake())


def test_blocks_and_marks_become_nodes(tab: Any) -> None:
    tab.evaluate(SHOW, TEXT)
    assert [(selector, shown(tab, selector)) for selector, _ in EXPECTED] == EXPECTED
    text = tab.inner_text(".markdown")
    assert "snake_case_name and 2 * 3 * 4, *no mark*" in text
    assert tab.locator(".markdown hr").count() == 1


def test_a_text_that_grows_ends_as_the_whole_text(tab: Any) -> None:
    whole, grown = tab.evaluate(GROW, TEXT)
    assert grown == whole


@pytest.mark.parametrize("index", range(len(HOSTILE)))
def test_hostile_marks_end_as_text(tab: Any, index: int) -> None:
    assert tab.evaluate(SHOW, HOSTILE[index]) >= 0
    assert tab.locator("#transcript :is(script, img, iframe)").count() == 0


@pytest.mark.parametrize(
    "address",
    [
        "javascript:alert(1)",
        "JaVaScRiPt:alert(1)",
        "data:text/html,x",
        "file:///etc/passwd",
        "//evil.example",
        "#x",
    ],
)
def test_only_http_addresses_become_links(tab: Any, address: str) -> None:
    tab.evaluate(SHOW, f"[label]({address}) <{address}>")
    assert tab.locator(".markdown a").count() == 0
    assert json.dumps(address)[1:-1] in json.dumps(tab.inner_text(".markdown"))
