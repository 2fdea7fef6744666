"""The light theme's contrast, measured on what is drawn, and the place of notices."""

import os
from collections.abc import Iterator

import pytest
from textual.color import Color
from textual.geometry import Region
from textual.widget import Widget

from edgeinfer_tui.app.app import LIGHT
from tests.tui.app.conftest import Chat, Opened
from tests.tui.fake_library import FakeModel

pytestmark = [pytest.mark.anyio, pytest.mark.slow]

MIN_CONTRAST = 4.5
"""WCAG 2.2, success criterion 1.4.3."""
DOCUMENT = """# One\n\n## Two\n\n### Three\n\n#### Four\n\nSome *text*, **bold**, `code`, [a link](https://x.y).

```python
@decorated
class Fox(Bear):
    \"\"\"A text.\"\"\"
    def run(self, count: int = 1) -> str:  # a comment
        return f"{count + 2.5!r}" if None is not self else 'text\\n'
```

```json
{"name": ["text", 1.5, true, null]}
```

```diff
- old
+ new
```

1. one\n2. two\n\n- a\n- b\n\n> quoted\n\n| a | b |\n|---|---|\n| 1 | 2 |\n"""
SIZES = [(80, 24), (120, 40), (200, 60)]


def drawn_pairs(screen: Widget) -> Iterator[tuple[str, Color, Color]]:
    """Each text on the screen with its color and that of its background. Lines of frames aren't texts."""
    for widget in screen.walk_children(Widget):
        if not widget.region or not widget.visible:
            continue
        for strip in widget.render_lines(Region(0, 0, *widget.region.size)):
            for segment in strip:
                style = segment.style
                if style is None or style.color is None or style.bgcolor is None:
                    continue
                if any(
                    mark.isprintable() and not "\u2500" <= mark <= "\u259f" for mark in segment.text.strip()
                ):
                    pair = Color.from_rich_color(style.color), Color.from_rich_color(style.bgcolor)
                    text, ground = reversed(pair) if style.reverse else pair
                    yield f"{type(widget).__name__}: {segment.text.strip()}", text, ground


def contrast(one: Color, other: Color) -> float:
    """The contrast ratio of WCAG 2.2, 1 to 21."""
    brighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (brighter + 0.05) / (darker + 0.05)


def luminance(color: Color) -> float:
    """The relative luminance of WCAG 2.2."""
    linear = [
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in color.normalized
    ]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def too_faint(chat: Chat) -> list[str]:
    pairs = list(drawn_pairs(chat.app.screen))
    assert len(pairs) >= 3
    return sorted(
        {
            f"{what}: {text.hex} on {ground.hex}, {contrast(text, ground):.2f}"
            for what, text, ground in pairs
            if contrast(text, ground) < MIN_CONTRAST
        }
    )


def notices(chat: Chat) -> list[Region]:
    """Where the notices are on the screen."""
    return [toast.region for toast in chat.screen.query("Toast") if toast.region]


@pytest.fixture(autouse=True)
def many_colors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLORTERM", "truecolor")
    monkeypatch.setenv("TERM", "xterm-256color")
    if "NO_COLOR" in os.environ:
        monkeypatch.delenv("NO_COLOR")


def test_contrast_is_that_of_wcag() -> None:
    assert contrast(Color.parse("#000000"), Color.parse("#ffffff")) == pytest.approx(21)
    assert contrast(Color.parse("#777777"), Color.parse("#ffffff")) == pytest.approx(4.48, abs=0.01)


def test_the_colors_of_the_light_theme_have_contrast() -> None:
    colors = LIGHT.to_color_system().generate()
    grounds = [Color.parse(colors[name]) for name in ("background", "surface", "panel", "panel-lighten-1")]
    names = [
        name for name in colors if name.startswith("text-") or name in ("primary", "accent", "foreground")
    ]
    texts = {name: Color.parse(colors[name]) for name in names if not colors[name].startswith("auto")}
    assert len(texts) >= 10
    faint = [
        f"{name} on {ground.hex}"
        for name, text in texts.items()
        for ground in grounds
        if not name.startswith("text-style") and contrast(ground.blend(text, text.a), ground) < MIN_CONTRAST
    ]
    assert faint == []


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("keys", ["", "tab", "f1", "f2", "f3", "f6", "f8"])
async def test_texts_of_the_light_theme_have_contrast(
    opened: Opened, size: tuple[int, int], keys: str
) -> None:
    async with opened(FakeModel(DOCUMENT), size=size, notices_shown=True) as chat:
        chat.app.switch_theme()
        await chat.press(*([keys] if keys else []))
        await chat.settle()
        assert too_faint(chat) == []
        await chat.press("escape")
        await chat.say("Hi")
        await chat.press(*([keys] if keys else []))
        await chat.settle()
        assert too_faint(chat) == []


@pytest.mark.parametrize("size", SIZES[1:])
@pytest.mark.parametrize("key", ["r", "x", "d"])
async def test_dialogs_of_the_list_of_chats_have_contrast(
    opened: Opened, size: tuple[int, int], key: str
) -> None:
    async with opened(size=size) as chat:
        chat.app.switch_theme()
        await chat.say("Hi")
        await chat.press("f8", key, "n")
        await chat.until(lambda: chat.app.screen is not chat.screen)
        await chat.pilot.pause()
        assert too_faint(chat) == []


async def test_notices_of_the_light_theme_have_contrast(opened: Opened) -> None:
    async with opened(notices_shown=True) as chat:
        chat.app.switch_theme()
        for severity in ("information", "warning", "error"):
            chat.app.notify("a text", title="a title", severity=severity)
        await chat.until(lambda: len(notices(chat)) == 3)
        assert too_faint(chat) == []


@pytest.mark.parametrize("size", [(40, 12), *SIZES])
async def test_notices_cover_neither_the_last_message_nor_the_input(
    opened: Opened, size: tuple[int, int]
) -> None:
    async with opened(FakeModel("line\n" * 40), size=size, notices_shown=True) as chat:
        await chat.say("Hi")
        chat.app.notify("a text")
        await chat.until(lambda: notices(chat))
        await chat.settle()
        shown = chat.views()[-1].region.intersection(chat.screen.transcript.region)
        assert shown.height >= 3
        assert not notices(chat)[0].overlaps(shown)
        assert not notices(chat)[0].overlaps(chat.screen.input.region)
        assert shown.bottom == chat.screen.transcript.region.bottom
        await chat.press("escape")
        await chat.until(lambda: chat.screen.transcript.styles.margin.top == 0)
