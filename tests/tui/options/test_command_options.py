"""The options of the commands derive from the fields of the option classes."""

import pytest

from edgeinfer.options.option_field import options_of
from edgeinfer_tui.options.command_options import CLASSES, command_options
from edgeinfer_tui.options.settings import setting_names

COMMANDS = (
    "run", "chat", "serve", "plan", "bench", "eval", "profile", "quantize", "doctor", "pull", "embed", "rank",
)  # fmt: skip


def test_every_command_of_an_option_exists_and_every_name_is_used_once() -> None:
    for kind in CLASSES:
        for name, info in options_of(kind).items():
            assert set(info.commands.split()) <= set(COMMANDS), name
    for command in COMMANDS:
        names = [
            name
            for kind in CLASSES
            for name, info in options_of(kind).items()
            if command in info.commands.split()
        ]
        assert len(names) == len(set(names)) == len(command_options(command))


@pytest.mark.parametrize(
    ("name", "end"),
    [
        ("temperature", "[dim](0.8)[/]"),
        ("repeat_penalty", "[dim](1.0: off)[/]"),
        ("dry_sequence_breakers", '[dim](\\n : " *)[/]'),
        ("n", "[dim](1)[/]"),
        ("stop", "May be repeated."),
    ],
)
def test_help_ends_with_the_default(name: str, end: str) -> None:
    option = command_options("run")[name].annotation.__metadata__[0]
    assert option.help.endswith(end)


def test_settings_are_the_persistent_options_of_run() -> None:
    names = setting_names()
    assert {"model", "context", "temperature", "context_overflow", "n", "system", "speed"} <= set(names)
    assert not {"stop", "raw", "session", "schema", "lookup_files", "logit_bias", "prompt_file"} & set(names)
