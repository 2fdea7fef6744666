"""The logic of the chat screen: it loads the model, sends messages, and streams and stops responses."""

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from typer import BadParameter

from edgeinfer.errors import EdgeInferError
from edgeinfer.history.tree import ChatMessage, newest_end
from edgeinfer.options.option_names import with_flags
from edgeinfer_tui import library
from edgeinfer_tui.app.message_input import with_files
from edgeinfer_tui.app.messages.response_reports import ResponseReports
from edgeinfer_tui.app.messages.transcript import NO_MODEL
from edgeinfer_tui.app.model_pull import ModelPulls
from edgeinfer_tui.app.model_status import MemoryPanel
from edgeinfer_tui.app.model_thread import ModelThread, RunningResponse
from edgeinfer_tui.app.tools.call_screen import CallScreen
from edgeinfer_tui.app.tools.chat_tools import MAX_ROUNDS, ChatTools, has_too_many_rounds
from edgeinfer_tui.app.welcome import Welcome
from edgeinfer_tui.chat_session import ChatSession, SessionStore, stored_model_name
from edgeinfer_tui.failures import one_line
from edgeinfer_tui.library import is_remote
from edgeinfer_tui.options.parsed_options import ParsedOptions, regeneration_options
from edgeinfer_tui.text_files import text_of

if TYPE_CHECKING:
    from edgeinfer.history.records import StoredChat
    from edgeinfer.results import Generation
    from edgeinfer_tui.app.chat_screen import ChatScreen

PAINT_SECONDS = 0.05
CONSTRAINTS = ("schema", "grammar")
NO_TEMPLATE = "no chat without a chat template; give one with --chat-template FILE"
Result = TypeVar("Result")


class ChatController:
    """Runs the chat of a screen: model, messages and responses.

    `store` None: chats are not saved. `fails` is called with the reason if no model can be loaded.
    """

    def __init__(
        self,
        screen: "ChatScreen",
        options: ParsedOptions,
        store: SessionStore | None,
        fails: Callable[[Exception], None],
        warnings: Sequence[str] = (),
    ) -> None:
        self.screen = screen
        self.thread = ModelThread()
        self.tools = ChatTools(options.mcp)
        self.settings = dict(options.generation)
        self.model_name = options.model
        self.running: RunningResponse | None = None
        self.editing: ChatMessage | None = None
        self.latest: Generation | None = None
        self.lost: str | None = None
        """Error if part of the chat could not be saved, else None."""
        self.store = store
        self._options, self._fails = options, fails
        self.session = ChatSession(system=options.system)
        self.last_error: str | None = None
        self._reports = ResponseReports(screen.notify)
        self.warnings = self._first_warnings = tuple(warnings)
        """Warnings from loading, shown until the first message."""
        self._waiting: str | None = None
        """A message sent while the model is loading."""
        self.pulls = ModelPulls(screen, options.loading.get("engine", "edgeinfer"))

    async def on_thread(self, work: Callable[[], Result]) -> Result:
        """Run a function on the model thread and await its result without blocking the screen."""
        return await asyncio.wrap_future(self.thread.do(work))

    async def start(self) -> None:
        """Show the saved chat first, so that it can be read while the model loads."""
        if self.store is not None:
            await self.on_thread(self.store.open)
        if self.store is None or self.store.stored is None:
            await self.take_up(self.session, None)
        else:
            await self.open_chat(self.store.stored)
        if self._options.system is not None:
            self.set_system(self._options.system)
        self.screen.run_worker(self._start_tools(), group="tools")
        await self.load(self.model_name)

    async def _start_tools(self) -> None:
        for line in await self.tools.start():
            self.screen.notify(line, severity="warning", markup=False, timeout=10)

    async def open_chat(self, stored: "StoredChat", at: int | None = None) -> None:
        """Continue a saved chat on its current branch, or at message `at`."""
        assert self.store is not None
        await self.take_up(await asyncio.to_thread(self.store.session, stored, at), stored)

    async def take_up(self, session: ChatSession, stored: "StoredChat | None") -> None:
        """Switch the screen to another chat; a response in progress is stopped and saved."""
        await self.stop_and_wait()
        if self.store is not None:
            self.store.record(session, lambda: self._stored_name(self.model_name), stored)
        self.session, self.latest, self.editing = session, None, None
        await self.screen.transcript.show(session.tree, session.line)
        self.screen.refresh_lines()
        self.screen.refresh_chats()

    async def load(self, name: str | None) -> None:
        """Load a model and replace the current one; if loading fails, the current one is loaded again."""
        await self.stop_and_wait()
        before = None if self.thread.model is None else (self.model_name, self.thread.model.name)
        self.screen.transcript.speaker = NO_MODEL
        try:
            await self._load(name)
        except Exception as error:
            if before is None:
                self._fails(error)
                return
            self.screen.notify(
                one_line(error), title="not loaded", severity="error", markup=False, timeout=10
            )
            if self.thread.model is not None:  # name not found: the previous model is still loaded
                self.screen.transcript.speaker = self.thread.model.name
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
        self.warnings, self._first_warnings = (*self._first_warnings, *map(with_flags, model.warnings)), ()
        plan, size = await self.on_thread(lambda: (model.plan, self._size()))
        lines = tuple(map(with_flags, (*model.warnings, *model.details)))
        self.screen.query_one(MemoryPanel).show(plan, lines)
        self.screen.query_one(Welcome).show(model.name, size, model.context, plan)
        await self.screen.transcript.show(self.session.tree, self.session.line)
        self.screen.refresh_lines()
        if self._waiting == self.screen.input.text:
            self.screen.input.send()
        self._waiting = None
        recorder = self.session.recorder
        if before is not None and recorder is not None:
            await self.on_thread(lambda: recorder.set_model(self._stored_name(name)))

    async def _load(self, name: str | None) -> None:
        self.screen.query_one(Welcome).show(name or "the built-in model", 0, None, None)
        future = asyncio.wrap_future(self.thread.do(lambda: self.thread.load(name, self._options.loading)))
        while not (await asyncio.wait({future}, timeout=PAINT_SECONDS))[0]:
            self.screen.refresh_lines()
        await future
        model = self.thread.model
        if model is None:
            return
        if model.chat_format is None:
            await self.on_thread(self.thread.close)
            from edgeinfer.errors import ChatTemplateError

            raise ChatTemplateError(f"{model.name}: {NO_TEMPLATE}")
        self.model_name = name
        self.screen.transcript.speaker = model.name
        self.screen.transcript.opens_reasoning = self.thread.opens_reasoning

    @property
    def _is_remote(self) -> bool:
        """Whether a server has the model."""
        return is_remote(self._options.loading)

    def _size(self) -> int:
        """Bytes of the model's files; 0: unknown."""
        return 0 if self._is_remote else library.model_size(self.model_name)

    def _stored_name(self, name: str | None) -> str:
        """The model's name for the store; a server's has no file."""
        model = self.thread.model
        return model.name if self._is_remote and model is not None else stored_model_name(name)

    async def send(self, text: str) -> bool:
        """Send a message, or the edited version of one; returns False if it can't be sent now."""
        if not self._ready():
            self._waiting = text if self.thread.model is None else None
            return False
        try:
            message = await asyncio.to_thread(with_files, text)
        except (EdgeInferError, OSError) as error:
            self.screen.notify(one_line(error), severity="error", markup=False)
            return False
        if not self._ready():
            return False
        instead, self.editing = self.editing, None
        self.begin(self.session.say(message, instead), 0)
        return True

    def respond_again(self, user_message: ChatMessage) -> None:
        """Generate another response to a message, as an alternative."""
        if self._ready():
            self.begin(self.session.add_response(user_message), len(user_message.children) - 1)

    def begin(self, response: ChatMessage, retries: int) -> None:
        """Start generating a response; `retries`: number of earlier responses to its message."""
        settings = regeneration_options(self.settings, retries)
        model = self.thread.model
        if model is not None and not self.is_constrained and (tools := self.tools.schemas(model.chat_format)):
            settings["tools"] = tools
        running = RunningResponse(response, settings)
        self.running, self.latest, self.warnings = running, None, ()
        self.screen.refresh_lines()
        self.screen.run_worker(self._follow(running), group="answer")

    def _ready(self) -> bool:
        is_busy = self.running is not None or self.tools.is_calling
        if is_busy:
            self.screen.notify("a response is being generated; Esc stops it")
        elif self.thread.model is None:
            self.screen.notify("the model is still being loaded; a message goes out once it is there")
        return not is_busy and self.thread.model is not None

    async def _follow(self, running: RunningResponse) -> None:
        """Show a response as it is generated; a message is shown once it is saved."""
        session = self.session
        recorder, user_message = session.recorder, running.message.parent
        assert user_message is not None
        if recorder is not None and user_message.stored is None:
            await self.on_thread(lambda: recorder.record(user_message))
            self.screen.refresh_chats()
        await self.screen.transcript.follow(session.tree, session.line)
        view = self.screen.transcript.view_of(running.message)
        assert view is not None
        system = session.system
        future = asyncio.wrap_future(self.thread.do(lambda: self.thread.respond(running, system, recorder)))
        pause = PAINT_SECONDS
        while not (await asyncio.wait({future}, timeout=pause))[0]:
            begin = time.monotonic()
            if self.thread.model is not None and running.latest is not None:
                self._reports.report_shifts(running.latest, self.thread.model.context)
            await view.show(ended=False)
            self.screen.refresh_lines()
            await self.screen.drawn()
            # The layout of a long response takes long; most of the time is left for keys and for the model.
            pause = max(PAINT_SECONDS, 2 * (time.monotonic() - begin))
        await future
        self.running, self.latest = None, running.latest
        await view.show(ended=True, failure=running.error)
        self._tell(running)
        self.screen.refresh_lines()
        self.screen.refresh_chats()
        if running.calls:
            await self._call_tools(running)

    async def _call_tools(self, running: RunningResponse) -> None:
        """Call the tools of a response, and generate the response to their results."""
        if has_too_many_rounds(running.message):
            self.screen.notify(f"stopped after {MAX_ROUNDS} responses with tool calls", severity="warning")
            return
        app = self.screen.app
        results = await self.tools.results(running.calls, lambda call: app.push_screen_wait(CallScreen(call)))
        self.screen.refresh_lines()
        if results is not None and self.session.tip is running.message:
            self.begin(self.session.add_results(running.message, results), 0)

    def note(self) -> str:
        """The line above the input: progress, or what needs attention; "" if there is nothing."""
        if self.tools.is_calling:
            return "calling a tool ..."
        if self.thread.loading is not None:
            return self.thread.loading.line()
        running = self.running
        if running is not None and running.stopped:
            return "stopping ..."
        if running is not None and not running.speaking:
            return running.reading.line()
        if self.editing is not None:
            return "editing a message: Enter sends it, Esc cancels"
        if self.last_error is not None:
            return f"not on the disk yet: {self.last_error}"
        if self.pulls.progress is not None:
            return self.pulls.progress.line()
        return "; ".join(self.warnings)

    def _tell(self, running: RunningResponse) -> None:
        """Report errors and warnings of a finished response."""
        model, result, recorder = self.thread.model, running.latest, self.session.recorder
        if model is not None and result is not None:
            self._reports.report_end(result, model.context)
        if text := self.session.new_error():
            self.screen.notify(text, severity="error", markup=False, timeout=20)
        self.last_error = None if recorder is None else recorder.last_error

    def stop(self) -> bool:
        """Stop the response in progress, if any; its text so far is kept."""
        if self.running is None:
            return self.tools.stop()
        self.running.stop()
        self.screen.refresh_lines()
        return True

    async def stop_and_wait(self) -> None:
        """Stop the response and wait until it has ended."""
        if self.stop():
            workers = [worker for worker in self.screen.workers if worker.group == "answer"]
            await self.screen.workers.wait_for_complete(workers)

    def set_system(self, text: str | None) -> None:
        """Set the system prompt, from the next response on."""
        self.session.system = text or None
        recorder = self.session.recorder
        if recorder is not None:
            self.thread.do(lambda: recorder.set_system(text or None))

    @property
    def is_constrained(self) -> bool:
        """Whether responses follow a schema or a grammar."""
        return not self.settings.keys().isdisjoint(CONSTRAINTS)

    def set_schema(self, path: Path | None) -> None:
        """Constrain responses to the JSON schema in a file; None: remove the constraint.

        Raises:
            EdgeInferError, OSError, BadParameter: no valid schema.
        """
        settings = {name: value for name, value in self.settings.items() if name not in CONSTRAINTS}
        if path is not None:
            from edgeinfer.structured.grammars import json_schema

            settings["schema"] = text_of(path, "/schema")
            json_schema(settings["schema"])
        self.settings = settings

    def schema_command(self, argument: str) -> None:
        """Constrain responses to the schema in a file, or report whether they are; "off": no constraint."""
        if not argument:
            state = "constrained; /schema off ends that" if self.is_constrained else "not constrained"
            hint = "/schema FILE: constrain them to a JSON schema"
            self.screen.notify(f"responses are {state}; {hint}", markup=False)
            return
        try:
            self.set_schema(None if argument == "off" else Path(argument).expanduser())
        except (EdgeInferError, OSError, BadParameter) as error:
            reason = error.message if isinstance(error, BadParameter) else one_line(error)
            self.screen.notify(reason, severity="error", markup=False)
            return
        self.screen.notify("from the next response on", timeout=2)

    async def show_alternative(self, message: ChatMessage, step: int) -> None:
        """Switch to the branch of another alternative of a message and continue the chat there."""
        if self.running is not None or self.tools.is_calling:
            self.screen.notify("a response is being generated; Esc stops it")
            return
        session = self.session
        other = session.tree.sibling(message, step)
        if other is None:
            return
        session.tip = newest_end(other)
        await self.screen.transcript.follow(session.tree, session.line)
        if view := self.screen.transcript.view_of(other):
            view.focus()
        recorder = session.recorder
        if recorder is not None:
            self.thread.do(lambda: recorder.set_tip(other))
        self.screen.refresh_lines()

    def leaving(self) -> Any:
        """Stop all work; the future completes once everything is saved and the model's memory is freed."""
        if self.running is not None:
            self.running.stop()
        self.tools.stop()
        self.thread.leave()
        self.pulls.stop()

        recorder, tip = self.session.recorder, self.session.tip

        def close() -> None:
            if recorder is not None and recorder.last_error and tip is not None:
                recorder.record(tip)
            self.lost = None if recorder is None else recorder.last_error
            self.tools.close()
            self.thread.close()
            if self.store is not None:
                self.store.close()

        return self.thread.do(close)
