"""Files in a message, and paths that are pasted."""

import os
from pathlib import Path

import pytest
from textual import events

from edgeinfer.errors import SettingError
from edgeinfer_tui.app.message_input import MAX_BYTES, mention_of, with_files
from tests.tui.app.conftest import Opened
from tests.tui.fake_library import FakeModel

pytestmark = pytest.mark.anyio


def test_a_mentioned_file_follows_the_message(tmp_path: Path) -> None:
    (tmp_path / "a b.py").write_text("print(1)\n", encoding="utf-8")
    (tmp_path / "c.txt").write_text("```\nfence\n```", encoding="utf-8")
    message = f'Explain @"{tmp_path}/a b.py" and @{tmp_path}/c.txt.'
    assert with_files(message) == (
        f"{message}\n\na b.py:\n```py\nprint(1)\n```\n\nc.txt:\n````txt\n```\nfence\n```\n````"
    )


def test_an_at_sign_without_a_file_is_unchanged() -> None:
    for message in (
        "Write to me@example.org or @nobody.",
        "@",
        "@Override",
        "@app.route('/x.py')",
        "@babel/core",
        "@" + "x" * 5000,
    ):
        assert with_files(message) == message


def test_a_binary_or_oversized_file_is_refused(tmp_path: Path) -> None:
    binary, latin, long = (tmp_path / name for name in ("binary", "latin", "long"))
    binary.write_bytes(b"a\0b")
    latin.write_bytes(b"caf\xe9")
    long.write_bytes(b"x" * (MAX_BYTES + 1))
    for path, output in (
        (binary, "no text"),
        (latin, "no text in UTF-8"),
        (long, f"wanted {MAX_BYTES} at most"),
    ):
        with pytest.raises(SettingError, match=output):
            with_files(f"@{path}")


def test_a_pasted_path_becomes_a_mention(tmp_path: Path) -> None:
    plain, spaced = tmp_path / "plain.txt", tmp_path / "with space.txt"
    plain.touch()
    spaced.touch()
    assert mention_of(f"{plain}\n") == f"@{plain}"
    assert mention_of(plain.as_uri()) == f"@{plain}"
    for pasted in (f"'{spaced}'", f'"{spaced}"', spaced.as_uri()):
        assert mention_of(pasted) == f'@"{spaced}"'
    if os.sep == "/":  # terminals of Windows escape nothing
        assert mention_of(str(spaced).replace(" ", "\\ ")) == f'@"{spaced}"'
    for pasted in ("", "file://", "file://C:/%", "a word", "/no/such/file", "'unclosed", str(tmp_path)):
        assert mention_of(pasted) is None
    assert mention_of(f"{plain}\n{plain}") is None


@pytest.mark.slow
async def test_a_file_in_a_message_reaches_the_model_and_an_invalid_one_is_reported(
    opened: Opened, tmp_path: Path
) -> None:
    (tmp_path / "notes.txt").write_text("foxes", encoding="utf-8")
    (tmp_path / "binary").write_bytes(b"\0")
    model = FakeModel()
    async with opened(model) as chat:
        chat.app.post_message(events.Paste(f"{tmp_path}/notes.txt"))
        await chat.until(lambda: chat.screen.input.text)
        assert chat.screen.input.text == f"@{tmp_path}/notes.txt "
        await chat.press("enter")
        await chat.until(lambda: model.prompts)
        await chat.settle()
        assert "notes.txt:\n```txt\nfoxes\n```" in model.prompts[0]
        await chat.say(f"@{tmp_path}/binary")
        assert any("no text" in notice for notice in chat.notices())
        assert chat.screen.input.text == f"@{tmp_path}/binary"
        assert len(model.prompts) == 1


async def test_a_pasted_text_keeps_its_lines(opened: Opened) -> None:
    async with opened() as chat:
        chat.app.post_message(events.Paste("one\ntwo"))
        await chat.until(lambda: chat.screen.input.text)
        assert chat.screen.input.text == "one\ntwo"
        await chat.press("ctrl+j", *"end")
        assert chat.screen.input.text == "one\ntwo\nend"
