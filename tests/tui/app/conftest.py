"""The chat with a fake model, driven by Textual's pilot."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from textual.pilot import Pilot

from edgeinfer.errors import UnknownModelError
from edgeinfer.history.records import StoredChat, StoredMessage
from edgeinfer.history.store import ChatStore
from edgeinfer_tui import library
from edgeinfer_tui.app.app import ChatApp
from edgeinfer_tui.app.messages.message_view import MessageView
from edgeinfer_tui.chat_session import SessionStore
from edgeinfer_tui.options.parsed_options import ParsedOptions
from tests.tui.fake_library import FakeModel

TIMEOUT_SECONDS = 30.0


class PacedModel(FakeModel):
    """Generates as many words as the test has allowed."""

    def __init__(self, response: str = "There was a fox.") -> None:
        self._allowed = threading.Semaphore(0)
        super().__init__(response, before_word=lambda: self._allowed.acquire(timeout=TIMEOUT_SECONDS))

    def allow(self, words: int) -> None:
        self._allowed.release(words)


class ObservedChatApp(ChatApp):
    """Lists the notices on the screen."""

    def __init__(self, *given: Any, **named: Any) -> None:
        self.shown_notices: list[str] = []
        super().__init__(*given, **named)

    def notify(self, message: str, **named: Any) -> None:
        self.shown_notices.append(message)
        super().notify(message, **named)

    def clear_notifications(self) -> None:
        self.shown_notices.clear()
        super().clear_notifications()


class Chat:
    """A running chat: input, and what is on the screen."""

    def __init__(self, pilot: "Pilot[None]", app: ObservedChatApp, store: Path) -> None:
        self.pilot, self.app, self.screen, self._store = pilot, app, app.chat_screen, store

    async def press(self, *keys: str) -> None:
        await self.pilot.press(*keys)
        await self.pilot.pause()

    async def say(self, text: str, wait: bool = True) -> None:
        """Type into the input line, and press Enter."""
        self.screen.input.text = text
        await self.press("enter")
        if wait:
            await self.settle()

    async def settle(self) -> None:
        """Wait until the chat is idle."""
        await self.until(lambda: self.app.chat.running is None and not any(self.app.workers))

    async def click(self, message: int, word: str) -> None:
        """Click a word of a message's header, once its position is stable."""
        head, seen = self.views()[message].query_one(".head"), None
        while seen != (result := (head.region, str(head.render()))):
            seen = result
            await self.pilot.pause(0.1)
        await self.pilot.click(head, offset=(result[1].index(word) + 1, 0))

    async def until(self, holds: Callable[[], object]) -> None:
        end = time.monotonic() + TIMEOUT_SECONDS
        while not holds():
            assert time.monotonic() < end, f"never came; shown: {self.shown()}"
            await self.pilot.pause()
            await asyncio.sleep(0)

    def views(self) -> list[MessageView]:
        return self.screen.transcript.views()

    def shown(self) -> list[str]:
        """The text of the messages, without reasoning."""
        return [view.response_text() for view in self.views()]

    def notices(self) -> list[str]:
        return self.app.shown_notices

    def stored(self) -> list[StoredChat]:
        with ChatStore(self._store) as store:
            return store.chats()

    def messages(self) -> list[StoredMessage]:
        """The branch of the chat that was changed last."""
        with ChatStore(self._store) as store:
            return store.branch(store.chats(1)[0])


Opened = Callable[..., AbstractAsyncContextManager[Chat]]


@pytest.fixture
def opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Opened:
    """Open the chat: `models` are what loading gives, one after the other, in its middle once `load_when`;
    `missing`: names that lead nowhere.
    """

    @asynccontextmanager
    async def open_chat(
        *models: FakeModel | Exception,
        stored: StoredChat | None = None,
        is_stored: bool = True,
        size: tuple[int, int] = (90, 30),
        load_when: threading.Event | None = None,
        missing: Sequence[str] = (),
        notices_shown: bool = False,
        warnings: Sequence[str] = (),
        **options: Any,
    ) -> AsyncIterator[Chat]:
        remaining = iter(models or [FakeModel()])

        def load(name: str | None, settings: dict[str, Any], *progress: Callable[[int, int], None]) -> Any:
            progress[0](1, 2)
            if load_when is not None:
                load_when.wait(TIMEOUT_SECONDS)
                progress[0](2, 2)
            model = next(remaining)
            if isinstance(model, Exception):
                raise model
            model.loaded_with = {"model": name, **settings}
            return model

        def check(name: str | None) -> None:
            if name in missing:
                raise UnknownModelError(f"{name}: no such model")

        monkeypatch.setattr(library, "load_model", load)
        monkeypatch.setattr(library, "check_model", check)
        monkeypatch.setattr(library, "model_size", lambda name: 5 << 30)
        path = tmp_path / "chats.sqlite"
        store = SessionStore(path, stored=stored) if is_stored else None
        app = ObservedChatApp(ParsedOptions("tiny", None, **options), store, warnings=warnings)
        async with app.run_test(size=size, notifications=notices_shown) as pilot:
            chat = Chat(pilot, app, path)
            if load_when is None:
                await chat.settle()
            else:
                await chat.until(lambda: app.chat.thread.loading is not None)
            yield chat
            if app.is_running:
                app.leave()
                await chat.until(lambda: app.at_rest)

    return open_chat
