"""The screen that runs a chat: it loads the model, sends messages, and streams and stops responses."""

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

from textual.app import ComposeResult
from textual.containers import Horizontal
from textual.content import Content
from textual.screen import Screen
from textual.widgets import Static

from edgeinfer.errors import EdgeInferError
from edgeinfer.history.tree import ChatTree, Turn
from edgeinfer_tui.app.attachments import with_files
from edgeinfer_tui.app.dialogue import Dialogue
from edgeinfer_tui.app.keeping import Keeping
from edgeinfer_tui.app.memory_panel import MemoryPanel
from edgeinfer_tui.app.message_input import MessageInput
from edgeinfer_tui.app.model_thread import ModelThread
from edgeinfer_tui.app.running_answer import RunningAnswer
from edgeinfer_tui.app.status_bar import StatusBar
from edgeinfer_tui.app.transcript import NO_MODEL, Transcript
from edgeinfer_tui.app.turn_view import MessageView
from edgeinfer_tui.failures import one_line
from edgeinfer_tui.options.run_options import RunOptions
from edgeinfer_tui.output.status_line import dropped_turns_line, full_line
from edgeinfer_tui.output.terminal_output import HARMLESS
from edgeinfer_tui.terminal_chat.chat_session import lasting_name

if TYPE_CHECKING:
    from edgeinfer.history.records import StoredChat
    from edgeinfer.results import Generation

DRAW_SECONDS = 0.05
DRAWN_SECONDS = 1.0
NO_TEMPLATE = "no chat without a chat template; give one with --chat-template FILE"
Result = TypeVar("Result")


class TalkScreen(Screen[None]):
    """`keeping` None: chats are not saved. `fails` is called with the reason if no model can be loaded."""

    def __init__(
        self,
        wishes: RunOptions,
        keeping: Keeping | None,
        stored: "StoredChat | None",
        fails: Callable[[Exception], None],
        remarks: Sequence[str] = (),
    ) -> None:
        super().__init__()
        self.thread = ModelThread()
        self.settings = dict(wishes.answering)
        self.model_name = wishes.model
        self.running: RunningAnswer | None = None
        self.editing: Turn | None = None
        self.latest: Generation | None = None
        self.lost: str | None = None
        """Error if part of the chat could not be saved, else None."""
        self.keeping = keeping
        self._wishes, self._stored, self._fails = wishes, stored, fails
        self.dialogue = Dialogue(ChatTree(), system=wishes.system)
        self._trouble: str | None = None
        self._dropped = 0
        self._left_out = 0
        """Number of evicted tokens when they were last reported."""
        self._remarks = self._first_remarks = tuple(remarks)
        """Warnings from loading, shown until the first message."""
        self._waiting: str | None = None
        """A message sent while the model is loading."""

    def compose(self) -> ComposeResult:
        yield Static(id="title", markup=False)
        with Horizontal(id="middle"):
            yield Transcript()
            yield MemoryPanel()
        yield Static(id="note", markup=False)
        yield MessageInput(self.complete)
        yield StatusBar()

    async def complete(self, line: str) -> str:
        """The line that Tab completes `line` to."""
        return line

    @property
    def transcript(self) -> Transcript:
        return self.query_one(Transcript)

    @property
    def input(self) -> MessageInput:
        return self.query_one(MessageInput)

    def on_mount(self) -> None:
        self.input.focus()
        self.run_worker(self._start(), group="model")

    async def on_thread(self, work: Callable[[], Result]) -> Result:
        """Run a function on the model thread and await its result without blocking the screen."""
        return await asyncio.wrap_future(self.thread.do(work))

    async def _start(self) -> None:
        """Show the saved chat first, so that it can be read while the model loads."""
        if self.keeping is not None:
            await self.on_thread(self.keeping.open)
        if self._stored is None:
            await self.take_up(self.dialogue, None)
        else:
            await self.open_chat(self._stored)
        if self._wishes.system is not None:
            self.set_system(self._wishes.system)
        await self.load(self.model_name)

    async def open_chat(self, stored: "StoredChat", at: int | None = None) -> None:
        """Continue a saved chat on its current branch, or at message `at`."""
        assert self.keeping is not None
        await self.take_up(await asyncio.to_thread(self.keeping.dialogue, stored, at), stored)

    async def take_up(self, dialogue: Dialogue, stored: "StoredChat | None") -> None:
        """Switch the screen to another chat; a response in progress is stopped and saved."""
        await self.stop_and_wait()
        if self.keeping is not None:
            self.keeping.recorded(dialogue, lambda: lasting_name(self.model_name), stored)
        self.dialogue, self.latest, self.editing = dialogue, None, None
        await self.transcript.show(dialogue.tree, dialogue.line)
        self.refresh_lines()

    async def load(self, name: str | None) -> None:
        """Load a model and replace the current one; if loading fails, the current one is loaded again."""
        await self.stop_and_wait()
        before = None if self.thread.model is None else (self.model_name, self.thread.model.name)
        self.transcript.speaker = NO_MODEL
        try:
            await self._load(name)
        except Exception as error:
            if before is None:
                self._fails(error)
                return
            self.notify(one_line(error), title="not loaded", severity="error", markup=False, timeout=10)
            if self.thread.model is not None:  # name not found: the previous model is still loaded
                self.transcript.speaker = self.thread.model.name
                return
            try:
                await self._load(before[0])
            except Exception as worse:
                self._fails(worse)
                return
            before = None
        model = self.thread.model
        if model is None:  # the program is exiting
            return
        self._remarks, self._first_remarks = (*self._first_remarks, *model.notes), ()
        self.query_one(MemoryPanel).show(await self.on_thread(lambda: model.plan), model.notes)
        await self.transcript.show(self.dialogue.tree, self.dialogue.line)
        self.refresh_lines()
        if self._waiting == self.input.text:
            self.input.send()
        self._waiting = None
        recorder = self.dialogue.recorder
        if before is not None and recorder is not None:
            await self.on_thread(lambda: recorder.set_model(lasting_name(name)))

    async def _load(self, name: str | None) -> None:
        future = asyncio.wrap_future(self.thread.do(lambda: self.thread.load(name, self._wishes.loading)))
        while not (await asyncio.wait({future}, timeout=DRAW_SECONDS))[0]:
            self.refresh_lines()
        await future
        model = self.thread.model
        if model is None:
            return
        if model.chat_format is None:
            await self.on_thread(self.thread.close)
            from edgeinfer.errors import ChatTemplateError

            raise ChatTemplateError(f"{model.name}: {NO_TEMPLATE}")
        self.model_name = name
        self.transcript.speaker, self.transcript.thinks_first = model.name, self.thread.thinks_first

    async def send(self, text: str) -> bool:
        """Send a message, or the edited version of one; returns False if it can't be sent now."""
        if not self._ready():
            self._waiting = text if self.thread.model is None else None
            return False
        try:
            message = await asyncio.to_thread(with_files, text)
        except (EdgeInferError, OSError) as error:
            self.notify(one_line(error), severity="error", markup=False)
            return False
        if not self._ready():
            return False
        instead, self.editing = self.editing, None
        self.begin(self.dialogue.say(message, self.settings, instead))
        return True

    def answer_again(self, asked: Turn) -> None:
        """Generate another response to a message, as an alternative."""
        if self._ready():
            self.begin(self.dialogue.answer(asked, self.settings))

    def begin(self, answer: RunningAnswer) -> None:
        """Start a response."""
        self.running, self.latest, self._remarks = answer, None, ()
        self.refresh_lines()
        self.run_worker(self._follow(answer), group="answer")

    def _ready(self) -> bool:
        if self.running is not None:
            self.notify("an answer is coming; Esc stops it")
        elif self.thread.model is None:
            self.notify("the model is still being loaded; a message goes out once it is there")
        return self.running is None and self.thread.model is not None

    async def _follow(self, answer: RunningAnswer) -> None:
        """Show a response as it is generated; a message is shown once it is saved."""
        dialogue = self.dialogue
        recorder, asked = dialogue.recorder, answer.turn.parent
        assert asked is not None
        if recorder is not None and asked.stored is None:
            await self.on_thread(lambda: recorder.record(asked))
        await self.transcript.follow(dialogue.tree, dialogue.line)
        view = self.transcript.view_of(answer.turn)
        assert view is not None
        system = dialogue.system
        future = asyncio.wrap_future(self.thread.do(lambda: self.thread.answer(answer, system, recorder)))
        pause = DRAW_SECONDS
        while not (await asyncio.wait({future}, timeout=pause))[0]:
            begin = time.monotonic()
            self._tell_slides(answer)
            await view.show(ended=False)
            self.refresh_lines()
            await self._drawn()
            # The layout of a long response takes long; most of the time is left for keys and for the model.
            pause = max(DRAW_SECONDS, 2 * (time.monotonic() - begin))
        await future
        self.running, self.latest = None, answer.latest
        await view.show(ended=True, failure=answer.error)
        self._tell(answer)
        self.refresh_lines()

    async def _drawn(self) -> None:
        """Wait until changes are drawn."""
        drawn = asyncio.Event()
        self.call_after_refresh(drawn.set)
        with suppress(TimeoutError):
            await asyncio.wait_for(drawn.wait(), DRAWN_SECONDS)

    def _tell(self, answer: RunningAnswer) -> None:
        """Report errors and warnings of a finished response."""
        model, result, recorder = self.thread.model, answer.latest, self.dialogue.recorder
        if model is not None and result is not None:
            dropped = dropped_turns_line(result, model.context)
            if dropped and result.dropped_turns != self._dropped:
                self.notify(dropped, severity="warning", markup=False, timeout=10)
            self._dropped = result.dropped_turns
            self._tell_slides(answer)
            if full := full_line(result, model.context):
                self.notify(full, severity="warning")
        trouble = None if recorder is None else recorder.trouble
        if trouble and trouble != self._trouble:
            told = f"this part of the chat isn't on the disk: {trouble}"
            self.notify(told, severity="error", markup=False, timeout=20)
        self._trouble = trouble

    def _tell_slides(self, answer: RunningAnswer) -> None:
        """Report each context shift."""
        model, result = self.thread.model, answer.latest
        if model is None or result is None:
            return
        if result.left_out_tokens > self._left_out:
            left_out = f"{result.left_out_tokens} behind the first are left out now"
            told = f"the context of {model.context} tokens slid: {left_out}"
            self.notify(told, severity="warning", markup=False, timeout=10)
        self._left_out = result.left_out_tokens

    def stop(self) -> bool:
        """Stop the response in progress, if any; its text so far is kept."""
        if self.running is None:
            return False
        self.running.stop()
        self.refresh_lines()
        return True

    async def stop_and_wait(self) -> None:
        """Stop the response and wait until it has ended."""
        if self.stop():
            answers = [worker for worker in self.workers if worker.group == "answer"]
            await self.workers.wait_for_complete(answers)

    def set_system(self, text: str | None) -> None:
        """Set the system prompt, from the next response on."""
        self.dialogue.system = text or None
        recorder = self.dialogue.recorder
        if recorder is not None:
            self.thread.do(lambda: recorder.set_system(text or None))

    def refresh_lines(self) -> None:
        """Update the lines above and below the messages."""
        model = self.thread.model
        title = self.dialogue.title or "a new chat"
        name = "" if model is None else f"  ·  {model.name}"
        self.query_one("#title", Static).update(Content(f"{title}{name}".translate(HARMLESS)))
        note = self._note()
        line = self.query_one("#note", Static)
        line.display = bool(note)
        line.update(Content(note))
        latest = self.running.latest if self.running is not None else self.latest
        bar = self.query_one(StatusBar)
        if isinstance(self.focused, MessageView):
            bar.show_keys(self.focused.hints())
        else:
            bar.show(latest, 0 if model is None else model.context, self.hints())

    def _note(self) -> str:
        if self.thread.loading is not None:
            return self.thread.loading.line()
        running = self.running
        if running is not None and running.stopped:
            return "stopping ..."
        if running is not None and not running.speaking:
            return running.reading.line()
        if self.editing is not None:
            return "changing a message: Enter sends it, Esc leaves it as it was"
        if self._trouble is not None:
            return f"not on the disk yet: {self._trouble}"
        return "; ".join(self._remarks)

    def hints(self) -> list[str]:
        """Commands available now, for the status line."""
        forms = {"schema": "JSON by a schema", "grammar": "by a grammar"}
        formed = [text for name, text in forms.items() if name in self.settings]
        return [*formed, "Esc stops" if self.running is not None else "F1 help"]

    def leaving(self) -> Any:
        """Stop all work; the future completes once everything is saved and the model's memory is freed."""
        if self.running is not None:
            self.running.stop()
        self.thread.leave()

        recorder, tip = self.dialogue.recorder, self.dialogue.tip

        def close() -> None:
            if recorder is not None and recorder.trouble and tip is not None:
                recorder.record(tip)
            self.lost = None if recorder is None else recorder.trouble
            self.thread.close()
            if self.keeping is not None:
                self.keeping.close()

        return self.thread.do(close)
