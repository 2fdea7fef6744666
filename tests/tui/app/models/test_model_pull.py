"""Downloads inside of the chat: progress, an end, a stop, a failure, and a switch to the new model."""

import threading
from collections.abc import Callable

import pytest
from textual.widgets import Static

from edgeinfer.errors import OfflineError
from edgeinfer_tui import library
from edgeinfer_tui.app.confirm_screen import ConfirmScreen
from tests.tui.app.conftest import TIMEOUT_SECONDS, Chat, Opened
from tests.tui.fake_library import ANSWER, FakeModel

pytestmark = pytest.mark.anyio

GIB = 1 << 30


class FakePull:
    """A download of 4 GiB, of which the test allows one after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None) -> None:
        self._allowed, self._error = threading.Semaphore(0), error
        self.requested: list[tuple[str, str]] = []
        monkeypatch.setattr(library, "pull_model", self.pull)

    def pull(self, name: str, engine: str, progress: Callable[[int, int | None], None]) -> str:
        self.requested.append((name, engine))
        for done in range(5):
            progress(done * GIB, 4 * GIB)
            self._allowed.acquire(timeout=TIMEOUT_SECONDS)
            if self._error:
                raise self._error
        return f"{name}:Q4_K_M"

    def allow(self, count: int) -> None:
        self._allowed.release(count)


def note(chat: Chat) -> str:
    return str(chat.screen.query_one("#note", Static).render())


def missing(monkeypatch: pytest.MonkeyPatch, name: str) -> set[str]:
    """Names that aren't on this disk yet."""
    names = {name}
    monkeypatch.setattr(library, "missing_model", lambda asked: asked if asked in names else None)
    return names


@pytest.mark.slow
async def test_a_download_shows_its_progress_while_the_chat_continues(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    pull = FakePull(monkeypatch)
    async with opened() as chat:
        await chat.say("/pull qwen3-8b", wait=False)
        await chat.until(lambda: "pulling qwen3-8b" in note(chat))
        pull.allow(2)
        await chat.until(lambda: "pulling qwen3-8b 2.0 GiB/4.0 GiB (50%)" in note(chat))
        chat.screen.input.text = "Hi"
        await chat.press("enter")
        await chat.until(lambda: chat.shown() == ["Hi", ANSWER])
        await chat.say("/pull qwen3-4b", wait=False)
        assert "pulling qwen3-8b: still in progress; /pull stops it" in chat.notices()
        pull.allow(3)
        await chat.settle()
        assert "qwen3-8b:Q4_K_M is here; /model qwen3-8b:Q4_K_M continues with it" in chat.notices()
        assert "pulling" not in note(chat)
        assert pull.requested == [("qwen3-8b", "edgeinfer")]


async def test_a_download_is_stopped(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    pull = FakePull(monkeypatch)
    async with opened() as chat:
        await chat.say("/pull qwen3-8b", wait=False)
        await chat.until(lambda: pull.requested)
        await chat.say("/pull", wait=False)
        pull.allow(1)
        await chat.settle()
        assert "stopped; /pull qwen3-8b continues the download" in chat.notices()
        await chat.say("/pull")
        assert "/pull NAME downloads a model; `edgeinfer list --all` lists them" in chat.notices()


@pytest.mark.slow
async def test_a_failed_download_is_reported(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    pull = FakePull(monkeypatch, OfflineError("the hub can't be reached"))
    async with opened() as chat:
        pull.allow(1)
        await chat.say("/pull qwen3-8b")
        assert "the hub can't be reached" in chat.notices()
        await chat.say("Hi")
        assert chat.shown() == ["Hi", ANSWER]


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("size", [(80, 24), (120, 40)])
async def test_a_missing_model_is_pulled_after_a_question_and_then_loaded(
    opened: Opened, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> None:
    pull, names = FakePull(monkeypatch), missing(monkeypatch, "qwen3-8b")
    other = FakeModel()
    other.name = "qwen3-8b"
    monkeypatch.setattr("edgeinfer_tui.app.chat_controller.stored_model_name", lambda name: str(name))
    async with opened(FakeModel(), other, size=size) as chat:
        await chat.say("/model qwen3-8b")
        await chat.until(lambda: isinstance(chat.app.screen, ConfirmScreen))
        question = str(chat.app.screen.query_one(".dialog > Static", Static).render())
        assert question == "qwen3-8b isn't on this disk yet. Pull it now?"
        await chat.press("tab", "enter")
        await chat.until(lambda: pull.requested)
        names.clear()
        pull.allow(5)
        await chat.until(lambda: chat.app.chat.thread.model is other)
        await chat.settle()
        assert str(chat.screen.query_one("#title", Static).render()).endswith("qwen3-8b")


@pytest.mark.slow
async def test_a_missing_model_is_not_pulled_without_consent(
    opened: Opened, monkeypatch: pytest.MonkeyPatch
) -> None:
    pull = FakePull(monkeypatch)
    missing(monkeypatch, "qwen3-8b")
    async with opened() as chat:
        await chat.say("/model qwen3-8b")
        await chat.until(lambda: isinstance(chat.app.screen, ConfirmScreen))
        await chat.press("enter")
        await chat.settle()
        assert pull.requested == []
        assert chat.app.screen is chat.screen


async def test_leaving_stops_a_download(opened: Opened, monkeypatch: pytest.MonkeyPatch) -> None:
    pull = FakePull(monkeypatch)
    async with opened() as chat:
        await chat.say("/pull qwen3-8b", wait=False)
        await chat.until(lambda: pull.requested)
        await chat.say("/exit", wait=False)
        pull.allow(1)
        await chat.until(lambda: chat.app.at_rest)
