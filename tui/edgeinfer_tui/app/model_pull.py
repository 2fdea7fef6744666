"""Downloads of models in the chat: one at a time, with its progress above the input."""

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING

from edgeinfer_tui import library
from edgeinfer_tui.app.confirm_screen import ConfirmScreen
from edgeinfer_tui.app.model_thread import Progress
from edgeinfer_tui.failures import one_line
from edgeinfer_tui.output.columns import shown_bytes

if TYPE_CHECKING:
    from edgeinfer_tui.app.chat_screen import ChatScreen

PAINT_SECONDS = 0.25


class PullStopped(BaseException):
    """Ends a download at its next progress report; its partial data is kept."""


class ModelPulls:
    """Downloads for the chat on a screen. The chat continues with its model during a download."""

    def __init__(self, screen: "ChatScreen", engine: str) -> None:
        self._screen, self._engine = screen, engine
        self._stop = threading.Event()
        self.progress: Progress | None = None
        """Of the download in progress; None: there is none."""

    def switch(self, name: str) -> None:
        """Load a model, after a question and a download if it isn't on this disk."""
        self._screen.run_worker(self._switch(name), group="model", exclusive=True)

    async def _switch(self, name: str) -> None:
        missing = await asyncio.to_thread(library.missing_model, name)
        if missing is None:
            await self._screen.chat.load(name)
            return

        def take(confirmed: bool | None) -> None:
            if confirmed:
                self.pull(missing, then=lambda: self.switch(missing))

        question = f"{missing} isn't on this disk yet. Pull it now?"
        self._screen.app.push_screen(ConfirmScreen(question, yes="Pull", no="Not now (Esc)"), take)

    def pull(self, name: str, then: Callable[[], None] | None = None) -> None:
        """Download a model; `then` is called once it is on this disk."""
        if self.progress is not None:
            self._screen.notify(f"{self.progress.label}: still in progress; /pull stops it", markup=False)
            return
        self._stop.clear()
        self.progress = Progress(f"pulling {name}", shown_bytes)
        self._screen.run_worker(self._pull(name, self.progress, then), group="pull")

    async def _pull(self, name: str, progress: Progress, then: Callable[[], None] | None) -> None:
        future = asyncio.wrap_future(_on_daemon(lambda: self._download(name, progress)))
        try:
            while not (await asyncio.wait({future}, timeout=PAINT_SECONDS))[0]:
                self._screen.refresh_lines()
            pulled = await future
        except Exception as error:
            self._screen.notify(
                one_line(error), title="not pulled", severity="error", markup=False, timeout=10
            )
            return
        finally:
            self.progress = None
            self._screen.refresh_lines()
        if pulled is None:
            self._screen.notify(f"stopped; /pull {name} continues the download", markup=False)
        elif then is not None:
            then()
        else:
            self._screen.notify(f"{pulled} is here; /model {pulled} continues with it", markup=False)

    def _download(self, name: str, progress: Progress) -> str | None:
        """The name of the downloaded model; None: it was stopped."""

        def update(done: int, total: int | None) -> None:
            if self._stop.is_set():
                raise PullStopped
            progress.done, progress.total = done, total or 0

        try:
            return library.pull_model(name, self._engine, update)
        except PullStopped:
            return None

    def stop(self) -> bool:
        """Stop the download in progress, if there is one."""
        self._stop.set()
        return self.progress is not None


def _on_daemon(work: "Callable[[], str | None]") -> "Future[str | None]":
    """The result of a function on a thread that doesn't keep the program from exiting."""
    future: Future[str | None] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name="pull", daemon=True).start()
    return future
