"""Stored chats: --continue, --session, --private, and `edgeinfer history`."""

import json
import os
import signal
from collections.abc import Iterable
from pathlib import Path

import pytest

from edgeinfer.history.recorder import Recorder
from edgeinfer.history.store import ChatStore
from edgeinfer.history.tree import ChatMessage, model_messages
from edgeinfer.results import Token
from edgeinfer_tui.chat_session import ChatSession, SessionStore
from edgeinfer_tui.library import Stream
from tests.tui.commands.test_run import pipe_in
from tests.tui.conftest import CommandLine
from tests.tui.fake_library import ANSWER, FakeChat, FakeModel
from tests.tui.terminal import Terminal


@pytest.fixture(autouse=True)
def _empty_stdin(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe_in(monkeypatch, b"")


class StoredSession:
    """A session with a fake model, and the store that records it."""

    def __init__(self, path: Path, **options: object) -> None:
        self.path = path
        self.store = ChatStore(path)
        self.model = FakeModel(**options)  # type: ignore[arg-type]
        self.warnings: list[str] = []
        self.chat = FakeChat(self.model, None)
        self.session = ChatSession()
        self.session.recorder = Recorder(self.store, lambda: self.store.new_chat("fake", name="kept"))

    def continued(self) -> ChatSession:
        """The chat as another program continues it."""
        stored = self.store.chat("kept")
        session = SessionStore(self.path).session(stored)
        session.recorder = Recorder(self.store, lambda: stored, stored)
        return session

    def drain(self, stream: Iterable[Token]) -> None:
        for _ in stream:
            pass
        if reported := self.session.new_error():
            self.warnings.append(reported)

    def stream(self, text: str, instead_of: ChatMessage | None = None) -> Stream:
        return self.session.stream(self.chat, text, {"progress": quiet}, instead_of)

    def send(self, text: str) -> None:
        self.drain(self.stream(text))

    @property
    def texts(self) -> list[str]:
        return [message.text for message in self.store.branch(self.store.chat("kept"))]


@pytest.fixture
def stored_session(tmp_path: Path) -> StoredSession:
    return StoredSession(tmp_path / "chats.sqlite")


def read(session: ChatSession) -> list[str]:
    """The messages of the prompt."""
    return [message["content"] for message in model_messages(session.line)]


def quiet(done: int, total: int) -> None:
    """A progress callback that does nothing."""


def test_each_token_is_stored_at_once(stored_session: StoredSession) -> None:
    stream = stored_session.stream("Hi")
    started = iter(stream)
    next(started)
    assert stored_session.texts == ["Hi", "There "]
    stored_session.drain(started)
    assert stored_session.texts == ["Hi", ANSWER]
    assert stored_session.warnings == []


def test_a_regenerated_response_and_an_edit_are_branches(stored_session: StoredSession) -> None:
    stored_session.send("Hi")
    stored_session.send("And?")
    user_message = stored_session.session.last_user_message
    assert user_message is not None
    stored_session.drain(
        stored_session.session.regenerate(stored_session.chat, user_message, {"progress": quiet})
    )
    completions = stored_session.store.alternatives(
        stored_session.store.branch(stored_session.store.chat("kept"))[-1]
    )
    assert [message.text for message in completions] == [ANSWER, ANSWER]
    stored_session.drain(stored_session.stream("Hello", stored_session.session.line[0]))
    assert stored_session.texts == ["Hello", ANSWER]
    first = stored_session.store.branch(stored_session.store.chat("kept"))[0]
    assert [message.text for message in stored_session.store.alternatives(first)] == ["Hi", "Hello"]
    stored_session.send("More")
    assert stored_session.texts == ["Hello", ANSWER, "More", ANSWER]


def test_an_interrupted_response_is_saved_partially(stored_session: StoredSession) -> None:
    stream = stored_session.stream("Hi")
    started = iter(stream)
    next(started)
    next(started)
    stream.cancel()
    (_, response) = stored_session.store.branch(stored_session.store.chat("kept"))
    assert (response.text, response.state) == ("There was ", "stopped")
    assert stream.result.finish_reason == "cancelled"


def test_after_clear_the_chat_continues_from_its_root(stored_session: StoredSession) -> None:
    stored_session.send("Hi")
    stored_session.session.tip = None
    stored_session.send("Anew")
    assert stored_session.texts == ["Anew", ANSWER]
    stored_session.session.set_system("Be kind.")
    assert stored_session.store.chat("kept").system == "Be kind."


def test_a_full_disk_does_not_stop_the_conversation(stored_session: StoredSession) -> None:
    stored_session.send("Hi")
    (pages,) = stored_session.store.connection.execute("PRAGMA page_count").fetchone()
    stored_session.store.connection.execute(f"PRAGMA max_page_count = {pages}")
    stored_session.send("long " * 5000)
    assert stored_session.warnings == ["this part of the chat isn't on the disk: database or disk is full"]
    assert len(stored_session.chat.messages) == 4
    stored_session.store.connection.execute("PRAGMA max_page_count = 100000")
    stored_session.send("And now?")
    assert stored_session.texts == ["Hi", ANSWER, "long " * 5000, ANSWER, "And now?", ANSWER]
    assert len(stored_session.warnings) == 1


def test_a_continued_chat_omits_messages_without_response(stored_session: StoredSession) -> None:
    stored_session.send("Hi")
    stored = stored_session.store.chat("kept")
    lost = stored_session.store.add_message(stored.id, stored.tip, "user", "Lost")
    stored_session.store.begin_message(stored.id, lost.id)
    session = stored_session.continued()
    assert read(session) == ["Hi", ANSWER]
    stored_session.drain(session.stream(FakeChat(stored_session.model, None), "More", {"progress": quiet}))
    assert stored_session.texts == ["Hi", ANSWER, "Lost", "", "More", ANSWER]
    assert read(session) == ["Hi", ANSWER, "More", ANSWER]


def test_a_message_without_response_between_others_is_omitted(stored_session: StoredSession) -> None:
    stored_session.send("Hi")
    stored = stored_session.store.chat("kept")
    lost = stored_session.store.add_message(stored.id, stored.tip, "user", "Lost")
    writer = stored_session.store.begin_message(stored.id, lost.id)
    user_message = stored_session.store.add_message(stored.id, writer.message, "user", "Again")
    stored_session.store.add_message(stored.id, user_message.id, "assistant", "Found")
    assert read(stored_session.continued()) == ["Hi", ANSWER, "Again", "Found"]


def test_a_session_continues_after_restart(edgeinfer: CommandLine, fake: FakeModel) -> None:
    assert edgeinfer("run", "tiny", "Hi", "--session", "foxes", "--system", "Be kind.").out == f"{ANSWER}\n"
    assert edgeinfer("run", "tiny", "And?", "--session", "foxes").code == 0
    assert edgeinfer("run", "tiny", "More", "--continue").code == 0
    assert fake.prompts == ["chat[Be kind.] Hi", "chat[Be kind.] And?", "chat[Be kind.] More"]
    # The prompt cache is stored too, so that continuing needs no prefill.
    assert (fake.loaded_with["snapshots"], fake.snapshots) == (True, 3)
    assert len(set(fake.snapshot_owners)) == 1
    assert fake.snapshot_owners[0] is not None
    printed = edgeinfer("history", "foxes").out
    assert printed.startswith("# Hi\n\ntiny, 20")
    assert printed.count(f"## Model\n\n{ANSWER}\n") == 3


def test_a_lone_argument_after_continue_is_the_message(edgeinfer: CommandLine, fake: FakeModel) -> None:
    edgeinfer("run", "tiny", "Hi", "--session", "foxes")
    assert edgeinfer("run", "--continue", "And?").code == 0
    assert edgeinfer("run", "--continue", "And then?").code == 0
    assert fake.prompts == ["chat[None] Hi", "chat[None] And?", "chat[None] And then?"]
    assert fake.loaded_with["model"] == "tiny"


def test_a_prompt_without_a_session_is_not_stored(edgeinfer: CommandLine, fake: FakeModel) -> None:
    edgeinfer("run", "tiny", "Hi")
    assert ("snapshots" in fake.loaded_with, fake.snapshots) == (False, 0)
    edgeinfer("run", "tiny", "Hi", "--chat")
    listed = edgeinfer("history")
    assert listed.out == ""
    assert listed.err == "edgeinfer: no chats yet; `edgeinfer chat` begins one\n"
    assert edgeinfer("history", "--search", "fox").err == "edgeinfer: 'fox': found in no chat\n"
    output = edgeinfer("run", "tiny", "Hi", "--continue")
    assert (output.code, output.err) == (1, "edgeinfer: --continue: there is no chat yet to continue\n")


@pytest.mark.parametrize("name", ["", " ", "99", "two\nlines", "x" * 81])
def test_an_invalid_session_name_is_refused_before_any_message(
    name: str, edgeinfer: CommandLine, fake: FakeModel
) -> None:
    outcome = edgeinfer("run", "tiny", "Hi", "--session", name)
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (1, "", 1)
    assert f"{name[:80]!r}: wanted a name" in outcome.err
    assert fake.prompts == []


EXCLUDED = {
    ("--continue", "--session", "x"): "--continue takes the last chat, --session the one named",
    ("--session", "x", "--private"): "--session and --continue continue a saved chat, --private saves none",
    ("--continue", "--raw"): "--session and --continue continue a saved chat, --raw has no chat",
}


@pytest.mark.parametrize(("options", "message"), EXCLUDED.items(), ids=[" ".join(key) for key in EXCLUDED])
def test_options_that_exclude_each_other(
    options: tuple[str, ...], message: str, edgeinfer: CommandLine, fake: FakeModel
) -> None:
    outcome = edgeinfer("run", "tiny", "Hi", *options)
    assert outcome.code == 2
    assert outcome.err.startswith(f"edgeinfer: {message}")


def test_chats_are_listed_searched_exported_named_and_deleted(
    edgeinfer: CommandLine, fake: FakeModel
) -> None:
    edgeinfer("run", "tiny", "Where do foxes live?", "--session", "foxes")
    edgeinfer("run", "tiny", "And bears?", "--session", "bears")
    rows = [line.split() for line in edgeinfer("history").out.splitlines()]
    assert [row[:4] for row in rows[1:]] == [["bears", "now", "2", "tiny"], ["foxes", "now", "2", "tiny"]]
    result = edgeinfer("history", "--search", "FOXES").out.splitlines()
    assert [line.split()[0] for line in result[1:]] == ["foxes"]
    lines = [json.loads(line) for line in edgeinfer("history", "foxes", "--export", "jsonl").out.splitlines()]
    assert [line.get("role") for line in lines] == [None, "user", "assistant"]
    assert edgeinfer("history", "foxes", "--name", "wolves").code == 0
    assert edgeinfer("history", "wolves", "--delete").err == "edgeinfer: wolves: deleted, 2 messages\n"
    assert [one["chat"] for one in json.loads(edgeinfer("history", "--json").out)] == ["bears"]
    assert (
        edgeinfer("history", "wolves").err
        == "edgeinfer: wolves: no such chat; `edgeinfer history` lists them\n"
    )
    assert edgeinfer("history", "--delete").code == 2


def chats_of(home: Path) -> ChatStore:
    return ChatStore(next(home.rglob("chats.sqlite")))


@pytest.mark.slow
def test_kill_9_in_a_chat_on_a_terminal_loses_nothing_and_it_continues(
    home: Path, opened: list[Terminal]
) -> None:
    terminal = Terminal(home, "run", "tiny")
    opened.append(terminal)
    terminal.wait_for("Ctrl-D leaves.")
    terminal.type("Count\n")
    terminal.wait_for("word word word word")
    os.kill(terminal.process.pid, signal.SIGKILL)
    terminal.process.wait()
    shown = 4 + terminal.seen.count("word")
    with chats_of(home) as store:
        (user_message, response) = store.branch(store.chats(1)[0])
    assert (user_message.text, response.state) == ("Count", "coming")
    assert response.text.count("word ") >= shown
    again = Terminal(home, "run", "--continue")
    opened.append(again)
    again.wait_for("continuing chat 1: Count (now)")
    again.wait_for("Ctrl-D leaves.")
    again.type("/stats\n")
    again.wait_for("1 message from you")
    again.type("/exit\n")
    assert again.exit_code() == 0


def test_a_private_chat_stores_nothing(home: Path, opened: list[Terminal]) -> None:
    terminal = Terminal(home, "run", "tiny", "--private")
    opened.append(terminal)
    terminal.wait_for("Ctrl-D leaves.")
    terminal.type("/exit\n")
    assert terminal.exit_code() == 0
    assert list(home.rglob("chats.sqlite")) == []
