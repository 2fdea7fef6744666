"""`edgeinfer chat` on the command line, up to where the screen begins."""

import subprocess
import sys

from tests.tui.conftest import CommandLine


def test_without_a_terminal_it_names_the_alternative(edgeinfer: CommandLine) -> None:
    outcome = edgeinfer("chat")
    assert outcome.code == 2
    assert "chat needs a terminal; for pipes and scripts there is: edgeinfer run" in outcome.err


def test_chat_help_lists_the_options_of_run(edgeinfer: CommandLine) -> None:
    out = edgeinfer("chat", "--help-all").out
    for option in ("--continue", "--session", "--private", "--system", "--context", "--draft", "--light"):
        assert option in out


def test_options_that_exclude_each_other_are_named(edgeinfer: CommandLine) -> None:
    outcome = edgeinfer("chat", "--continue", "--private")
    assert outcome.code == 2
    assert "--private saves none" in outcome.err


def test_other_commands_start_without_textual() -> None:
    code = (
        "import sys\nfrom edgeinfer_tui.command_line import exit_code\n"
        "exit_code(['--help'])\nprint('textual' in sys.modules)\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip().endswith("False")
