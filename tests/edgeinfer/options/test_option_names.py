"""Messages name what the user typed: a keyword in Python, a flag on the command line."""

import pytest

from edgeinfer.errors import ContextOverflowError, EdgeInferError, SettingError
from edgeinfer.options import LoadOptions
from edgeinfer.options.option_names import error_with_flags, flags_by_name, with_flags
from edgeinfer_tui.options.command_options import all_options


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("take a larger context (context=): it fits", "take a larger context (--context): it fits"),
        ("draft=None leaves it out", "--draft none leaves it out"),
        ("leave it out, or repack=False", "leave it out, or --no-repack"),
        ("raw=False does that; raw=True too", "--chat does that; --raw too"),
        ("add engine='llama.cpp'", "add --engine llama.cpp"),
        ("replace it with overwrite=True", "replace it with --force"),
        ("give one (chat_template=)", "give one (--chat-template)"),
        ("lookup_files=, then", "--lookup-file, then"),
    ],
)
def test_keywords_become_flags(text: str, shown: str) -> None:
    assert with_flags(text) == shown


@pytest.mark.parametrize(
    "text",
    [
        "/models/seed=1.gguf: no such file",
        "seed=1.gguf: not in the model registry",
        "saw 'context=', wanted a text",
        "total=None of these",
        "x = context",
        "pool.context= is no option",
    ],
)
def test_names_of_files_and_values_stay(text: str) -> None:
    assert with_flags(text) == text


@pytest.mark.parametrize(
    ("error", "shown"),
    [
        (SettingError("top_p: saw 2.0, wanted"), "--top-p: saw 2.0, wanted"),
        (SettingError("schema: saw no JSON"), "--json-schema: saw no JSON"),
        (SettingError("best_of and beams: leave one out"), "--best-of and --beams: leave one out"),
        (SettingError("schema, grammar: saw both"), "--json-schema, --grammar: saw both"),
        (SettingError("qwen3: top_p: saw 2"), "qwen3: top_p: saw 2"),
        (SettingError("text: saw 5"), "--text: saw 5"),
        (ContextOverflowError("context: too long (context=)"), "context: too long (--context)"),
    ],
)
def test_a_setting_in_front_of_an_error_becomes_its_flag(error: EdgeInferError, shown: str) -> None:
    assert error_with_flags(error) == shown


def test_only_options_of_the_classes_given_are_renamed() -> None:
    assert with_flags("context= and top_p=", (LoadOptions,)) == "--context and top_p="


def test_the_flags_are_those_of_the_command_line() -> None:
    shown = {option.name: option.flags for option in all_options()}
    taken = {name: flags for name, flags in flags_by_name().items() if name in shown}
    assert taken == {name: shown[name] for name in taken}
    assert {"context", "draft", "schema", "top_p", "best_of"} <= taken.keys()
