"""Access to the page: contrast of both themes, narrow screens, the keyboard, names for screen readers."""

from typing import Any

import pytest

pytest.importorskip("starlette")
pytest.importorskip("httpx")

from tests.edgeinfer.serving.http_client import fake
from tests.edgeinfer.serving.page.conftest import OpenPage

MARKDOWN = """# Head
Text with `code`, [a link](https://example.com/x) and *marks*.
> A quotation
1. One
   - Two

| a | b |
|---|---|
| 1 | 2 |

```python
print("A line of code that is longer than a narrow screen, so that it has to be scrolled to the side.")
```
"""
MIN_CONTRAST = 4.5
CONTRASTS = """() => {
    const canvas = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
    const rgba = (color) => {
        canvas.clearRect(0, 0, 1, 1);
        canvas.fillStyle = color;
        canvas.fillRect(0, 0, 1, 1);
        return [...canvas.getImageData(0, 0, 1, 1).data];
    };
    const light = ([r, g, b]) => [r, g, b].map((c) => c / 255)
        .map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4))
        .reduce((sum, c, i) => sum + c * [0.2126, 0.7152, 0.0722][i], 0);
    const ground = (node) => {
        for (; node; node = node.parentElement) {
            const color = rgba(getComputedStyle(node).backgroundColor);
            if (color[3] === 255) return color;
        }
        return [255, 255, 255];
    };
    const result = [];
    const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
    while (walker.nextNode()) {
        const node = walker.currentNode.parentElement;
        if (!walker.currentNode.data.trim() || !node.checkVisibility({ visibilityProperty: true })) continue;
        if (node.closest("button:disabled, noscript, #drop")) continue;
        const [a, b] = [light(rgba(getComputedStyle(node).color)), light(ground(node))];
        const ratio = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
        result.push([ratio, walker.currentNode.data.trim().slice(0, 30)]);
    }
    for (const node of document.querySelectorAll("[placeholder]")) {
        const [a, b] = [light(rgba(getComputedStyle(node, "::placeholder").color)), light(ground(node))];
        result.push([(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), node.placeholder]);
    }
    return result;
}"""
NAMELESS = """() => [...document.querySelectorAll("button, input, select, textarea, [tabindex='0']")]
    .filter((node) => !(node.textContent.trim() || node.getAttribute("aria-label") || node.labels?.length))
    .map((node) => node.outerHTML.slice(0, 80))"""


def send(tab: Any, text: str) -> None:
    tab.fill("#message", text)
    tab.press("#message", "Enter")
    tab.wait_for_selector("article.assistant[aria-busy=false]")
    tab.wait_for_selector("#chats .chat")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_has_contrast_in_both_themes(open_page: OpenPage, scheme: str) -> None:
    tab = open_page(fake(f"<think>Hm.</think>{MARKDOWN}", context=2048), {"color_scheme": scheme})
    send(tab, "Show everything")
    tab.click("article.assistant summary")
    tab.keyboard.press("Alt+Shift+E")
    tab.keyboard.press("Control+/")
    tab.wait_for_selector("dialog[open]")
    contrasts = tab.evaluate(CONTRASTS)
    assert len(contrasts) > 60
    assert [one for one in contrasts if one[0] < MIN_CONTRAST] == []
    background = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(255, 255, 255)") == (scheme == "light")


def test_the_theme_follows_the_system_until_one_is_selected(open_page: OpenPage) -> None:
    def background() -> str:
        return str(tab.evaluate("getComputedStyle(document.body).backgroundColor"))

    tab = open_page(fake(), {"color_scheme": "light"})
    light = background()
    tab.emulate_media(color_scheme="dark")
    dark = background()
    assert dark != light
    tab.click("#theme")
    assert (background(), tab.get_attribute("#theme", "aria-label")) == (light, "Theme: light")
    tab.reload()
    tab.wait_for_selector(".welcome")
    assert background() == light
    tab.emulate_media(color_scheme="light")
    tab.click("#theme")
    assert (background(), tab.get_attribute("#theme", "aria-label")) == (dark, "Theme: dark")
    tab.keyboard.press("Alt+Shift+L")
    assert (background(), tab.get_attribute("#theme", "aria-label")) == (light, "Theme: as the system")


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("width", [320, 1280, 390, 768])
def test_nothing_is_wider_than_the_screen(open_page: OpenPage, width: int) -> None:
    tab = open_page(
        fake(f"{MARKDOWN}\n{'x' * 300}", context=2048), {"viewport": {"width": width, "height": 700}}
    )
    tab.fill("#message", "y" * 300)
    tab.press("#message", "Enter")
    tab.wait_for_selector("article.assistant[aria-busy=false]")
    tab.wait_for_selector("#send:visible")
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.evaluate("document.querySelector('#transcript').scrollWidth") <= width
    for name in ("#message", "#send", "#theme", "#help"):
        box = tab.locator(name).bounding_box()
        assert box["x"] >= 0
        assert box["x"] + box["width"] <= width
    if tab.is_visible("#open-sidebar"):
        assert not tab.is_visible("#search")
        tab.click("#open-sidebar")
        assert tab.evaluate("document.activeElement.id") == "search"
        tab.keyboard.press("Escape")
        tab.wait_for_selector("#search", state="hidden")
    assert width > 767 or tab.is_visible("#open-sidebar")


def test_everything_is_reached_by_the_keyboard(open_page: OpenPage) -> None:
    tab = open_page(fake())
    assert tab.evaluate("document.activeElement.id") == "message"
    tab.keyboard.type("One")
    tab.keyboard.press("Shift+Enter")
    tab.keyboard.type("two")
    assert tab.input_value("#message") == "One\ntwo"
    tab.keyboard.press("Enter")
    tab.wait_for_selector("article.assistant[aria-busy=false]")
    tab.keyboard.press("Alt+Shift+R")
    tab.wait_for_selector("article.assistant[aria-busy=false] .versions:has-text('2/2')")
    tab.keyboard.press("Alt+Shift+E")
    assert tab.is_visible("#editing")
    tab.keyboard.press("Escape")
    assert not tab.is_visible("#editing")
    tab.keyboard.press("Alt+Shift+K")
    order = []
    for _ in range(20):
        order.append(tab.evaluate("document.activeElement.id || document.activeElement.className"))
        tab.keyboard.press("Tab")
        if order[-1] == "send":
            break
    expected = [
        "search",
        "chat",
        "plan",
        "settings",
        "theme",
        "help",
        "edit",
        "again",
        "attach",
        "message",
        "send",
    ]
    assert [name for name in order if name in expected] == expected
    tab.keyboard.press("Alt+Shift+N")
    tab.wait_for_selector(".welcome")
    assert tab.evaluate("document.activeElement.id") == "message"
    tab.keyboard.press("Control+/")
    assert "Alt+Shift+N" in tab.inner_text("dialog")
    tab.keyboard.press("Escape")
    tab.wait_for_selector("dialog", state="detached")


def test_screen_readers_find_landmarks_names_and_the_response(open_page: OpenPage) -> None:
    tab = open_page(fake("First paragraph.\n\nSecond one."))
    send(tab, "Hi")
    assert tab.evaluate(NAMELESS) == []
    for landmark in ("nav[aria-label]", "main", "header h1", "form[aria-label]", "section[aria-label]"):
        assert tab.locator(landmark).count() >= 1, landmark
    assert tab.get_attribute("html", "lang") == "en"
    assert tab.get_attribute("#live", "aria-live") == "polite"
    lines = tab.locator("#live p").all_inner_texts()
    assert [line for line in lines if line] == ["First paragraph.", "Second one.", "End of the response."]
    settings = tab.locator("#settings")
    settings.click()
    assert tab.evaluate(NAMELESS) == []
    tab.fill("#set-system", "Be brief.")
    tab.fill("#set-temperature", "0.5")
    tab.click("dialog .primary")
    tab.wait_for_selector("dialog", state="detached")
    tab.reload()
    tab.wait_for_selector("article.assistant")
    settings.click()
    assert tab.input_value("#set-system") == "Be brief."
