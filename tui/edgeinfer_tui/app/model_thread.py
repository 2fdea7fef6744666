"""The thread that owns the model and the chat store; the screen never blocks on it."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

from edgeinfer_tui import library
from edgeinfer_tui.chat_session import start_from_results, start_response
from edgeinfer_tui.failures import one_line
from edgeinfer_tui.library import Conversation, LoadedModel, Stream
from edgeinfer_tui.output.columns import shown_bytes
from edgeinfer_tui.output.progress_line import shown_time

if TYPE_CHECKING:
    from edgeinfer.chat_templates.tool_calls import ToolCall
    from edgeinfer.history.recorder import Recorder
    from edgeinfer.history.records import State
    from edgeinfer.history.tree import ChatMessage
    from edgeinfer.results import Generation


@dataclass
class Progress:
    """Progress of a long operation; written by one thread, read by another."""

    label: str
    shown: Callable[[int], str] = str
    done: int = 0
    total: int = 0
    started: float = field(default_factory=time.monotonic)

    def line(self) -> str:
        """For example: reading the prompt 512/2048 (25%), 3 s left."""
        if not self.total or self.done >= self.total:
            return f"{self.label} ..."
        seconds = (
            (time.monotonic() - self.started) / self.done * (self.total - self.done) if self.done else 0.0
        )
        left = f", {shown_time(seconds)} left" if seconds >= 1 else ""
        counted = f"{self.shown(self.done)}/{self.shown(self.total)} ({self.done / self.total:.0%})"
        return f"{self.label} {counted}{left}"


class RunningResponse:
    """The screen's view of a response that the model thread generates; its text is that of `message`."""

    def __init__(self, message: "ChatMessage", settings: dict[str, Any]) -> None:
        """`message`: the message that receives the response, in the chat's tree."""
        self.message, self.settings = message, settings
        self.reading = Progress("reading the prompt")
        self.speaking = False
        """Whether the first token was generated."""
        self.latest: Generation | None = None
        """Latest statistics; final ones once the response has ended."""
        self.error: str | None = None
        self.calls: tuple[ToolCall, ...] = ()
        """The tool calls of the complete response."""
        self._stop = threading.Event()

    def stop(self) -> None:
        """Stop generating at the next token."""
        self._stop.set()

    @property
    def stopped(self) -> bool:
        return self._stop.is_set()


MEASURE_SECONDS = 0.25
FORMS = ("schema", "grammar")
Result = TypeVar("Result")


class LoadingCancelled(BaseException):
    """Cancels the loading of a model when the program exits."""


class ModelThread:
    """Loads models, generates responses and records them, one job at a time.

    `model` None: no model is loaded. Functions given to `do` run on the thread; call the other methods only
    there.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="model")
        self._leaving = threading.Event()
        self.loading: Progress | None = None
        self.model: LoadedModel | None = None
        self._closing: str | None = None
        """Text that closes the reasoning block that the template opens before each response, or None."""
        self._conversation: Conversation | None = None
        self._snapshot_owner: str | None = None
        """Owner whose deletion also deletes the prompt cache of the current chat; None: the chat isn't
        stored."""

    def do(self, work: Callable[[], Result]) -> "Future[Result]":
        """Queue a function on the thread, after earlier ones."""
        return self._executor.submit(work)

    def leave(self) -> None:
        """Cancel loading, if a model is being loaded, at its next progress report."""
        self._leaving.set()

    def finish(self) -> None:
        """Accept no more jobs and drop queued ones. Returns at once."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    def load(self, name: str | None, settings: dict[str, Any]) -> None:
        """Load a model and replace the current one; after `leave` no model is loaded.

        Raises: as `edgeinfer.load`; then no model is loaded, or the previous one if the name was not found.
        """
        if self.model is not None and not library.is_remote(settings):
            library.check_model(name)
        self.close()
        reading = Progress("loading the model", shown_bytes)
        building = Progress("compiling kernels for this machine, once")
        self.loading = reading

        def report_to(progress: Progress) -> Callable[[int, int], None]:
            def update(done: int, total: int) -> None:
                if self._leaving.is_set():
                    raise LoadingCancelled
                if self.loading is not progress:
                    progress.started = time.monotonic()
                progress.done, progress.total = done, total
                self.loading = progress

            return update

        try:
            self.model = library.load_model(name, settings, report_to(reading), report_to(building))
        except LoadingCancelled:
            return
        finally:
            self.loading = None
        self._closing = _closing(self.model)

    def close(self) -> None:
        """Free the model's memory; the KV cache is saved first if a prompt cache is in use."""
        model, self.model, self._conversation = self.model, None, None
        if model is not None:
            if self._snapshot_owner is not None:
                model.keep_snapshot(self._snapshot_owner)
            model.close()

    def discard_snapshot(self, owner: str) -> None:
        """Save no KV cache for `owner`, whose chat is deleted."""

        def discard() -> None:
            if self._snapshot_owner == owner:
                self._snapshot_owner = None

        self.do(discard)

    def respond(self, running: RunningResponse, system: str | None, recorder: "Recorder | None") -> None:
        """Generate a response; every piece is recorded before it is shown. Failures are set as
        `running.error`."""
        message = running.message
        if recorder is not None:
            recorder.begin(message)
        try:
            state = self._generate_response(running, system, recorder)
        except Exception as error:
            running.error, state = one_line(error), "failed"
        message.state = state
        if recorder is not None:
            recorder.finish(message, state)
        self._snapshot_owner = None if recorder is None else recorder.snapshot_owner

    def _generate_response(
        self, running: RunningResponse, system: str | None, recorder: "Recorder | None"
    ) -> "State":
        message, stream = running.message, None

        def read(done: int, total: int) -> None:
            running.reading.done, running.reading.total = done, total
            if running.stopped and stream is not None:
                stream.cancel()

        stream = self._stream(running, system, read)
        if self._closing is not None and not running.settings.keys().isdisjoint(FORMS):
            # Constrained output begins after the reasoning block, so the block is closed first.
            self._take(f"{self._closing}\n\n", message, recorder)
        measured = 0.0
        for token in stream:
            if token.text:
                self._take(token.text, message, recorder)
            running.speaking = True
            if running.stopped:
                break
            if (now := time.monotonic()) - measured > MEASURE_SECONDS:
                measured, running.latest = now, stream.result
        if running.stopped:
            stream.cancel()
        running.latest = stream.result
        if running.stopped:
            return "stopped"
        if running.settings.get("tools"):
            self._take_calls(running, recorder)
        return "whole"

    def _take_calls(self, running: RunningResponse, recorder: "Recorder | None") -> None:
        """Store the tool calls of a response in the format of the store, whatever the model's is."""
        from edgeinfer.history.tool_messages import text_with_calls

        chat = self._conversation
        if chat is not None and chat.tool_calls:
            running.calls = chat.tool_calls
            running.message.text = text_with_calls(str(chat.messages[-1]["content"]), chat.tool_calls)
            if recorder is not None:
                recorder.replace(running.message)

    @property
    def opens_reasoning(self) -> bool:
        """Whether the template opens a reasoning block before each response."""
        return self._closing is not None

    @staticmethod
    def _take(text: str, message: "ChatMessage", recorder: "Recorder | None") -> None:
        """Add a piece to the response; it is recorded before it can be shown."""
        if recorder is not None:
            recorder.add(text)
        message.text += text

    def _stream(self, running: RunningResponse, system: str | None, progress: library.Progress) -> Stream:
        """Start a response; tokens that the KV cache holds are not prefilled again."""
        assert self.model is not None
        assert running.message.parent is not None
        chat = self._conversation
        if chat is None:
            chat = self._conversation = self.model.chat(system=system)
        before, options = running.message.parent, {**running.settings, "progress": progress}
        if before.role == "tool":
            return start_from_results(chat, before, system, options)
        return start_response(chat, before.parent, before.text, system, options)


def _closing(model: LoadedModel) -> str | None:
    """Text that closes the reasoning block, if the template opens one at its end."""
    from edgeinfer.chat_templates.reasoning import closing_mark

    if model.chat_format is None or not hasattr(model.chat_format, "render"):
        return None
    return closing_mark(str(model.chat_format.render([{"role": "user", "content": "Hi"}])))
