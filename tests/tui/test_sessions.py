"""Chats that are kept: --continue, --session, --private, and `edgeinfer chats`."""

import json
import os
import signal
from pathlib import Path

import pytest

from edgeinfer.history.recorder import Recorder
from edgeinfer.history.records import StoredChat
from edgeinfer.history.store import ChatStore
from edgeinfer.history.tree import ChatTree, Turn
from edgeinfer_tui.terminal_chat.kept_conversation import KeptConversation
from tests.tui.conftest import CommandLine
from tests.tui.fake_library import ANSWER, FakeChat, FakeModel
from tests.tui.terminal import Terminal
from tests.tui.test_run import pipe_in


@pytest.fixture(autouse=True)
def _nothing_piped(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe_in(monkeypatch, b"")


class Kept:
    """A conversation of a fake model, and the store that it is kept in."""

    def __init__(self, path: Path, **behaviour: object) -> None:
        self.store = ChatStore(path)
        self.model = FakeModel(**behaviour)  # type: ignore[arg-type]
        self.told: list[str] = []
        self.chat = self.conversation(None, ChatTree(), None)

    def conversation(self, stored: StoredChat | None, tree: ChatTree, tip: Turn | None) -> KeptConversation:
        recorder = Recorder(self.store, lambda: self.store.new_chat("fake", name="kept"), stored)
        return KeptConversation(FakeChat(self.model, None), recorder, tree, tip, self.told.append)

    def gone_on_with(self) -> KeptConversation:
        """The chat as another program would take it up."""
        stored = self.store.chat("kept")
        tree = ChatTree(self.store.turns(stored))
        return self.conversation(stored, tree, tree.with_number(stored.tip))

    def hear(self, stream: object) -> None:
        for _ in stream:  # type: ignore[attr-defined]
            pass

    def say(self, text: str) -> None:
        self.hear(self.chat.stream(text, progress=lambda done, total: None))

    @property
    def texts(self) -> list[str]:
        return [turn.text for turn in self.store.branch(self.store.chat("kept"))]


@pytest.fixture
def kept(tmp_path: Path) -> Kept:
    return Kept(tmp_path / "chats.sqlite")


def quiet(done: int, total: int) -> None:
    """A progress that nobody looks at."""


def test_what_is_said_is_in_the_store_as_it_comes(kept: Kept) -> None:
    stream = kept.chat.stream("Hi", progress=quiet)
    coming = iter(stream)
    next(coming)
    assert kept.texts == ["Hi", "There "]
    kept.hear(coming)
    assert kept.texts == ["Hi", ANSWER]
    assert kept.told == []


def test_an_answer_given_again_and_an_edit_are_branches(kept: Kept) -> None:
    kept.say("Hi")
    kept.say("And?")
    kept.hear(kept.chat.regenerate(progress=quiet))
    answers = kept.store.alternatives(kept.store.branch(kept.store.chat("kept"))[-1])
    assert [turn.text for turn in answers] == [ANSWER, ANSWER]
    kept.hear(kept.chat.edit(0, "Hello", progress=quiet))
    assert kept.texts == ["Hello", ANSWER]
    first = kept.store.branch(kept.store.chat("kept"))[0]
    assert [turn.text for turn in kept.store.alternatives(first)] == ["Hi", "Hello"]
    kept.say("More")
    assert kept.texts == ["Hello", ANSWER, "More", ANSWER]


def test_a_stopped_answer_is_kept_as_far_as_it_came(kept: Kept) -> None:
    stream = kept.chat.stream("Hi", progress=quiet)
    coming = iter(stream)
    next(coming)
    next(coming)
    stream.cancel()
    (_, answer) = kept.store.branch(kept.store.chat("kept"))
    assert (answer.text, answer.state) == ("There was ", "stopped")
    assert stream.result.finish_reason == "cancelled"


def test_after_clear_the_chat_goes_on_from_its_root(kept: Kept) -> None:
    kept.say("Hi")
    kept.chat.clear()
    kept.say("Anew")
    assert kept.texts == ["Anew", ANSWER]
    kept.chat.system = "Be kind."
    assert kept.store.chat("kept").system == "Be kind."


def test_a_full_disk_does_not_stop_the_conversation(kept: Kept) -> None:
    kept.say("Hi")
    (pages,) = kept.store._connection.execute("PRAGMA page_count").fetchone()
    kept.store._connection.execute(f"PRAGMA max_page_count = {pages}")
    kept.say("long " * 5000)
    assert kept.told == ["this part of the chat isn't on the disk: database or disk is full"]
    assert len(kept.chat.messages) == 4
    kept.store._connection.execute("PRAGMA max_page_count = 100000")
    kept.say("And now?")
    assert kept.texts == ["Hi", ANSWER, "long " * 5000, ANSWER, "And now?", ANSWER]
    assert len(kept.told) == 1


def test_a_chat_that_is_gone_on_with_leaves_out_what_was_not_answered(kept: Kept) -> None:
    kept.say("Hi")
    stored = kept.store.chat("kept")
    lost = kept.store.add_turn(stored.id, stored.tip, "user", "Lost")
    kept.store.begin_turn(stored.id, lost.id)
    chat = kept.gone_on_with()
    assert [turn["content"] for turn in chat.messages] == ["Hi", ANSWER]
    kept.hear(chat.stream("More", progress=quiet))
    assert kept.texts == ["Hi", ANSWER, "More", ANSWER]


def test_an_unanswered_message_between_others_is_left_out_alone(kept: Kept) -> None:
    kept.say("Hi")
    stored = kept.store.chat("kept")
    lost = kept.store.add_turn(stored.id, stored.tip, "user", "Lost")
    writer = kept.store.begin_turn(stored.id, lost.id)
    asked = kept.store.add_turn(stored.id, writer.turn, "user", "Again")
    kept.store.add_turn(stored.id, asked.id, "assistant", "Found")
    assert [turn["content"] for turn in kept.gone_on_with().messages] == ["Hi", ANSWER, "Again", "Found"]


def test_a_session_goes_on_where_it_was_left(edgeinfer: CommandLine, fake: FakeModel) -> None:
    assert edgeinfer("run", "tiny", "Hi", "--session", "foxes", "--system", "Be kind.").out == f"{ANSWER}\n"
    assert edgeinfer("run", "tiny", "And?", "--session", "foxes").code == 0
    assert edgeinfer("run", "tiny", "More", "--continue").code == 0
    assert fake.asked == ["chat[Be kind.] Hi", "chat[Be kind.] And?", "chat[Be kind.] More"]
    # What was read is kept too, so that going on needs no reading.
    assert (fake.loaded_with["snapshots"], fake.snapshots) == (True, 3)
    assert len(set(fake.snapshot_owners)) == 1
    assert fake.snapshot_owners[0] is not None
    printed = edgeinfer("chats", "foxes").out
    assert printed.startswith("# Hi\n\ntiny, 20")
    assert printed.count(f"## Model\n\n{ANSWER}\n") == 3


def test_what_stands_alone_behind_continue_is_said_to_the_model_of_the_chat(
    edgeinfer: CommandLine, fake: FakeModel
) -> None:
    edgeinfer("run", "tiny", "Hi", "--session", "foxes")
    assert edgeinfer("run", "--continue", "And?").code == 0
    assert edgeinfer("run", "--continue", "And then?").code == 0
    assert fake.asked == ["chat[None] Hi", "chat[None] And?", "chat[None] And then?"]
    assert fake.loaded_with["model"] == "tiny"


def test_a_prompt_without_a_session_is_not_kept(edgeinfer: CommandLine, fake: FakeModel) -> None:
    edgeinfer("run", "tiny", "Hi")
    assert ("snapshots" in fake.loaded_with, fake.snapshots) == (False, 0)
    edgeinfer("run", "tiny", "Hi", "--chat")
    listed = edgeinfer("chats")
    assert listed.out.split() == ["CHAT", "CHANGED", "MESSAGES", "MODEL", "BEGINS"]
    assert listed.err == "edgeinfer: no chats yet; `edgeinfer chat` begins one\n"
    assert edgeinfer("chats", "--search", "fox").err == "edgeinfer: 'fox': found in no chat\n"
    said = edgeinfer("run", "tiny", "Hi", "--continue")
    assert (said.code, said.err) == (1, "edgeinfer: --continue: there is no chat yet to go on with\n")


@pytest.mark.parametrize("name", ["", " ", "99", "two\nlines", "x" * 81])
def test_a_session_that_can_have_no_such_name_is_refused_before_anything_is_said(
    name: str, edgeinfer: CommandLine, fake: FakeModel
) -> None:
    outcome = edgeinfer("run", "tiny", "Hi", "--session", name)
    assert (outcome.code, outcome.out, outcome.err.count("\n")) == (1, "", 1)
    assert f"{name[:80]!r}: wanted a name" in outcome.err
    assert fake.asked == []


EXCLUDED = {
    ("--continue", "--session", "x"): "--continue takes the last chat, --session the one named",
    ("--session", "x", "--private"): "--session and --continue go on with a kept chat, --private keeps none",
    ("--continue", "--raw"): "--session and --continue go on with a kept chat, --raw knows none",
}


@pytest.mark.parametrize(("options", "message"), EXCLUDED.items(), ids=[" ".join(key) for key in EXCLUDED])
def test_options_that_exclude_each_other(
    options: tuple[str, ...], message: str, edgeinfer: CommandLine, fake: FakeModel
) -> None:
    outcome = edgeinfer("run", "tiny", "Hi", *options)
    assert outcome.code == 2
    assert outcome.err.startswith(f"edgeinfer: {message}")


def test_chats_are_listed_searched_exported_named_and_forgotten(
    edgeinfer: CommandLine, fake: FakeModel
) -> None:
    edgeinfer("run", "tiny", "Where do foxes live?", "--session", "foxes")
    edgeinfer("run", "tiny", "And bears?", "--session", "bears")
    rows = [line.split() for line in edgeinfer("chats").out.splitlines()]
    assert [row[:4] for row in rows[1:]] == [["bears", "now", "2", "tiny"], ["foxes", "now", "2", "tiny"]]
    found = edgeinfer("chats", "--search", "FOXES").out.splitlines()
    assert [line.split()[0] for line in found[1:]] == ["foxes"]
    lines = [json.loads(line) for line in edgeinfer("chats", "foxes", "--export", "jsonl").out.splitlines()]
    assert [line.get("role") for line in lines] == [None, "user", "assistant"]
    assert edgeinfer("chats", "foxes", "--name", "wolves").code == 0
    assert edgeinfer("chats", "wolves", "--delete").err == "edgeinfer: wolves: deleted, 2 messages\n"
    assert [one["chat"] for one in json.loads(edgeinfer("chats", "--json").out)] == ["bears"]
    assert (
        edgeinfer("chats", "wolves").err == "edgeinfer: wolves: no such chat; `edgeinfer chats` lists them\n"
    )
    assert edgeinfer("chats", "--delete").code == 2


def chats_of(home: Path) -> ChatStore:
    return ChatStore(next(home.rglob("chats.sqlite")))


def test_kill_9_in_a_chat_on_a_terminal_loses_nothing_and_it_goes_on(
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
        (asked, answer) = store.branch(store.chats(1)[0])
    assert (asked.text, answer.state) == ("Count", "coming")
    assert answer.text.count("word ") >= shown
    again = Terminal(home, "run", "--continue")
    opened.append(again)
    again.wait_for("going on with chat 1: Count (now)")
    again.wait_for("Ctrl-D leaves.")
    again.type("/stats\n")
    again.wait_for("1 message from you")
    again.type("/exit\n")
    assert again.exit_code() == 0


def test_a_private_chat_leaves_nothing(home: Path, opened: list[Terminal]) -> None:
    terminal = Terminal(home, "run", "tiny", "--private")
    opened.append(terminal)
    terminal.wait_for("Ctrl-D leaves.")
    terminal.type("/exit\n")
    assert terminal.exit_code() == 0
    assert list(home.rglob("chats.sqlite")) == []
