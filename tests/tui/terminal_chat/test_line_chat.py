"""The line chat: messages, commands, and reports."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from edgeinfer_tui.chat_session import ChatSession
from edgeinfer_tui.system.terminal_calls import END_OF_INPUT_KEY
from edgeinfer_tui.terminal_chat.line_chat import LineChat
from edgeinfer_tui.terminal_chat.line_input import LineInput
from tests.tui.fake_library import ANSWER, FakeModel


def typed(*lines: str | type[BaseException]) -> Callable[[str], str]:
    """Replaces input(): types these lines, raises these exceptions, then Ctrl-D."""
    remaining: Iterator[str | type[BaseException]] = iter(lines)

    def read(prompt: str) -> str:
        line = next(remaining, EOFError)
        if not isinstance(line, str):
            raise line
        return line

    return read


class Session:
    """One chat with typed input."""

    def __init__(
        self,
        folder: Path,
        capsys: pytest.CaptureFixture[str],
        *lines: str | type[BaseException],
        **options: object,
    ) -> None:
        self.model = FakeModel(**options)  # type: ignore[arg-type]
        lines_in = LineInput(folder / "state" / "history", typed(*lines))
        LineChat(self.model, ChatSession(), {"temperature": 0.0}, lines_in).run()
        self.chat = self.model.chats[0]
        self.out, self.err = capsys.readouterr()


RunChat = Callable[..., Session]


@pytest.fixture
def run_chat(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> RunChat:
    def begin(*lines: str | type[BaseException], **options: object) -> Session:
        return Session(tmp_path, capsys, *lines, **options)

    return begin


@pytest.mark.skipif(sys.platform == "win32", reason="no readline there")
def test_messages_get_responses_until_ctrl_d(run_chat: RunChat) -> None:
    session = run_chat("Hi", "", "And you?")
    assert session.model.prompts == ["chat[None] Hi", "chat[None] And you?"]
    assert session.out == f"{ANSWER}\n{ANSWER}\n\n"
    assert session.model.settings == [{"temperature": 0.0}] * 2
    assert session.err.startswith("fake, context 1024 tokens. /help lists the commands, Ctrl-D leaves.\n")


@pytest.mark.parametrize("word", ["/exit", "/bye", "/quit"])
def test_exit_quits(run_chat: RunChat, word: str) -> None:
    assert run_chat(word, "Hi").model.prompts == []


def test_help_lists_every_command(run_chat: RunChat) -> None:
    output = run_chat("/help").err
    for command in ["/help", "/system", "/regen", "/edit", "/clear", "/stats", "/exit", '"""', "Ctrl-C"]:
        assert command in output


def test_an_unknown_command_suggests_the_nearest(run_chat: RunChat) -> None:
    session = run_chat("/sytem x")
    assert "/sytem: no such command; did you mean /system?\n" in session.err
    assert session.model.prompts == []


def test_a_fence_holds_several_lines_and_a_backslash_continues_a_line(run_chat: RunChat) -> None:
    session = run_chat('"""first', "/not a command", 'last"""', "one \\", "two", '"""all in one"""')
    assert session.model.prompts == [
        "chat[None] first\n/not a command\nlast",
        "chat[None] one \ntwo",
        "chat[None] all in one",
    ]


def test_a_fence_left_open_ends_with_ctrl_d(run_chat: RunChat) -> None:
    assert run_chat('"""', "open", EOFError).model.prompts == ["chat[None] open"]


def test_system_is_shown_and_set(run_chat: RunChat) -> None:
    session = run_chat("/system", "/system Be brief.", "/system", "Hi")
    assert "none; /system TEXT sets one\nfrom the next response on\nBe brief.\n" in session.err
    assert session.model.prompts == ["chat[Be brief.] Hi"]


def test_regen_replaces_the_response(run_chat: RunChat) -> None:
    session = run_chat("/regen", "Hi", "/regen")
    assert "no message yet to respond to again" in session.err
    assert [message["role"] for message in session.chat.messages] == ["user", "assistant"]
    assert session.model.prompts == ["chat[None] Hi"] * 2


def test_regen_uses_the_next_seed(tmp_path: Path) -> None:
    model = FakeModel()
    lines = LineInput(tmp_path / "history", typed("Hi", "/regen", "/regen", "And?", "/regen"))
    LineChat(model, ChatSession(), {"seed": 7}, lines).run()
    assert [settings["seed"] for settings in model.settings] == [7, 8, 9, 7, 8]


def test_edit_changes_the_last_message(run_chat: RunChat) -> None:
    session = run_chat("/edit x", "One", "Two", "/edit Three")
    assert "no message yet to edit" in session.err
    output = [message["content"] for message in session.chat.messages if message["role"] == "user"]
    assert output == ["One", "Three"]


@pytest.mark.skipif(sys.platform == "win32", reason="no readline there")
def test_edit_without_text_opens_the_message_for_editing(run_chat: RunChat) -> None:
    session = run_chat("One", "/edit", "One and a half")
    assert [message["content"] for message in session.chat.messages if message["role"] == "user"] == [
        "One and a half"
    ]


def test_clear_removes_all_messages(run_chat: RunChat) -> None:
    session = run_chat("Hi", "/clear", "/stats")
    assert session.chat.messages == []
    assert "cleared\n0 messages from you, context 0/1024 tokens\n" in session.err


def test_stats_show_speed_and_context(run_chat: RunChat) -> None:
    output = run_chat("Hi", "/stats").err
    assert "ttft 0.21 s · prompt 312 t/s (9 tokens) · decode 54 t/s (4 tokens) · context 13/1024\n" in output
    assert "1 message from you, context 5/1024 tokens\n" in output


def test_ctrl_c_stops_and_keeps_the_response(run_chat: RunChat) -> None:
    session = run_chat("Hi", "/exit", interrupt_after=2)
    assert session.out == "There was \n"
    assert "(stopped; the text so far is kept)\n" in session.err
    assert session.chat.messages[-1] == {"role": "assistant", "content": "There was "}


def test_ctrl_c_at_the_prompt_explains_how_to_quit(run_chat: RunChat) -> None:
    session = run_chat(KeyboardInterrupt, "Hi")
    assert f"({END_OF_INPUT_KEY} or /exit leaves)\n" in session.err
    assert session.model.prompts == ["chat[None] Hi"]


def test_dropped_messages_are_reported(run_chat: RunChat) -> None:
    expected = "the conversation exceeded the context of 1024 tokens: the 2 oldest messages were dropped\n"
    assert expected in run_chat("Hi", dropped_messages=2).err
    assert "the oldest message was dropped\n" in run_chat("Hi", dropped_messages=1).err


def test_a_context_shift_is_reported(run_chat: RunChat) -> None:
    reported = "the text exceeded the context of 1024 tokens and was shifted once: 256 tokens"
    assert f"{reported} after the first were evicted\n" in run_chat("Hi", shift_after=1).err


def test_a_failed_response_is_one_line_and_the_chat_continues(run_chat: RunChat) -> None:
    session = run_chat("overflow", "Hi")
    assert "edgeinfer: prompt: 2000 tokens, wanted at most 1024\n" in session.err
    assert session.model.prompts == ["chat[None] Hi"]


@pytest.mark.skipif(sys.platform == "win32", reason="no readline there")
def test_an_input_history_that_cannot_be_saved_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "state").write_text("a file where a folder should be")
    assert "; the history is not saved\n" in Session(tmp_path, capsys, "Hi").err
