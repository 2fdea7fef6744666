"""The thread on which the model and the store of chats live; the screen never waits for it."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from edgeinfer_tui import library
from edgeinfer_tui.app.running_answer import Progress, RunningAnswer
from edgeinfer_tui.failures import one_line
from edgeinfer_tui.library import Conversation, LoadedModel, Stream
from edgeinfer_tui.output.byte_sizes import shown_bytes

if TYPE_CHECKING:
    from edgeinfer.history.recorder import Recorder
    from edgeinfer.history.records import State
    from edgeinfer.history.tree import Turn

MEASURE_SECONDS = 0.25
FORMS = ("schema", "grammar")
Result = TypeVar("Result")


class Leaving(BaseException):
    """Ends the loading of a model that nobody waits for any more."""


class ModelThread:
    """Loads, answers and records, one after the other.

    `model` None: none is loaded. What is given to `do` runs on the thread; the other methods are for there.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._leaving = threading.Event()
        self.loading: Progress | None = None
        self.model: LoadedModel | None = None
        self._closing: str | None = None
        """What ends the thought that the template opens in front of each answer, if it does."""
        self._conversation: Conversation | None = None
        self._snapshot_owner: str | None = None
        """With what a snapshot of the chat that the model has read last is deleted; None: it isn't stored."""

    def do(self, work: Callable[[], Result]) -> "Future[Result]":
        """Have something done on the thread, behind what it was given before."""
        return self._executor.submit(work)

    def leave(self) -> None:
        """Have the loading of a model, if there is one, end as soon as it reports."""
        self._leaving.set()

    def finish(self) -> None:
        """Take no more work; what is waiting is dropped. Returns at once."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def load(self, name: str | None, settings: dict[str, Any]) -> None:
        """Put a model in place of the one that there is; there is none after `leave`.

        Raises: as `edgeinfer.load`; there is no model then, or the one before if the name leads nowhere.
        """
        if self.model is not None:
            library.check_model(name)
        self.close()
        reading = Progress("loading the model", shown_bytes)
        building = Progress("compiling kernels for this machine, once")
        self.loading = reading

        def heard(progress: Progress) -> Callable[[int, int], None]:
            def update(done: int, total: int) -> None:
                if self._leaving.is_set():
                    raise Leaving
                if self.loading is not progress:
                    progress.since = time.monotonic()
                progress.done, progress.total = done, total
                self.loading = progress

            return update

        try:
            self.model = library.load_model(name, settings, heard(reading), heard(building))
        except Leaving:
            return
        finally:
            self.loading = None
        self._closing = _closing(self.model)

    def close(self) -> None:
        """Give the model's memory back; what it has read is kept first, where it was loaded for that."""
        model, self.model, self._conversation = self.model, None, None
        if model is not None:
            if self._snapshot_owner is not None:
                model.keep_snapshot(self._snapshot_owner)
            model.close()

    def answer(self, answer: RunningAnswer, system: str | None, recorder: "Recorder | None") -> None:
        """Have the model answer; every piece is recorded before it is shown. Failures are `answer.error`."""
        turn = answer.turn
        if recorder is not None:
            recorder.begin(turn)
        try:
            state = self._speak(answer, system, recorder)
        except Exception as error:
            answer.error, state = one_line(error), "failed"
        turn.state = state
        if recorder is not None:
            recorder.finish(turn, state)
        self._snapshot_owner = None if recorder is None else recorder.snapshot_owner

    def _speak(self, answer: RunningAnswer, system: str | None, recorder: "Recorder | None") -> "State":
        turn, stream = answer.turn, None

        def read(done: int, total: int) -> None:
            answer.reading.done, answer.reading.total = done, total
            if answer.stopped and stream is not None:
                stream.cancel()

        stream = self._stream(answer, system, read)
        if self._closing is not None and not answer.settings.keys().isdisjoint(FORMS):
            # An answer that keeps to a form begins behind the thought.
            self._take(f"{self._closing}\n\n", turn, recorder)
        measured = 0.0
        for token in stream:
            if token.text:
                self._take(token.text, turn, recorder)
            answer.speaking = True
            if answer.stopped:
                break
            if (now := time.monotonic()) - measured > MEASURE_SECONDS:
                measured, answer.latest = now, stream.result
        if answer.stopped:
            stream.cancel()
        answer.latest = stream.result
        return "stopped" if answer.stopped else "whole"

    @property
    def thinks_first(self) -> bool:
        """Whether the template opens a thought in front of each answer."""
        return self._closing is not None

    @staticmethod
    def _take(text: str, turn: "Turn", recorder: "Recorder | None") -> None:
        """A piece of the answer; recorded before it can be shown."""
        if recorder is not None:
            recorder.add(text)
        turn.text += text

    def _stream(self, answer: RunningAnswer, system: str | None, progress: library.Progress) -> Stream:
        """Begin an answer; what the conversation shares with `answer.before` isn't read again."""
        assert self.model is not None
        chat = self._conversation
        if chat is None:
            chat = self._conversation = self.model.chat(system=system)
        chat.system = system
        settings = {**answer.settings, "progress": progress}
        before: list[dict[str, Any]] = [dict(message) for message in answer.before]
        if chat.messages[: len(before)] != before:
            chat.clear()
            chat.messages = before
        if len(chat.messages) > len(before):
            return chat.edit(len(before) // 2, answer.text, **settings)
        return chat.stream(answer.text, **settings)


def _closing(model: LoadedModel) -> str | None:
    """What ends the thought, if that is what the template begins last."""
    from edgeinfer.chat_templates.reasoning import closing_mark

    if model.chat_format is None or not hasattr(model.chat_format, "render"):
        return None
    return closing_mark(str(model.chat_format.render([{"role": "user", "content": "Hi"}])))
