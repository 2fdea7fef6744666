"""`--thinking` and `--template-arg`."""

import sys
from pathlib import Path

import pytest

from edgeinfer_tui.options.parsed_options import template_args
from tests.tui.conftest import CommandLine

TEMPLATE = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking %} aloud{% endif %}{{ mood }}"
)


@pytest.fixture
def template(tmp_path: Path) -> str:
    path = tmp_path / "template.jinja"
    path.write_text(TEMPLATE)
    return str(path)


def test_values_are_json_or_text() -> None:
    given = ["a=1", "b=true", "c=words", 'd="1"', "e=", 'f={"g": [1]}', "h=x=y"]
    assert template_args(given) == {
        "a": 1, "b": True, "c": "words", "d": "1", "e": "", "f": {"g": [1]}, "h": "x=y"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--thinking", "high"], 1, "thinking: saw 'high', but the model's chat template supports on, off"),
        (["--thinking", "maybe"], 2, "wanted one of on, off, low, medium, high"),
        (["--template-arg", "mood"], 2, "saw 'mood', wanted NAME=VALUE"),
        (
            ["--template-arg", "temper=1"],
            1,
            "the chat template doesn't read 'temper'; it reads: enable",
        ),
        (["--template-arg", "messages=1"], 1, "'messages' is set by edgeinfer"),
    ],
)
def test_options_the_template_lacks_give_a_one_line_error(
    edgeinfer: CommandLine, template: str, options: list[str], code: int, message: str
) -> None:
    outcome = edgeinfer("serve", "tiny", "--chat-template", template, "--port", "0", *options)
    assert outcome.code == code
    assert message in outcome.err
    assert outcome.err.count("\n") == 1


def test_variables_and_levels_reach_the_template(
    edgeinfer: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    path = tmp_path / "template.jinja"
    names = ["messages[0].content", "enable_thinking", "reasoning_effort", "preserve_thinking"]
    path.write_text("{{ raise_exception(" + " ~ ' ' ~ ".join(names) + ") }}")
    options = [
        "--thinking",
        "high",
        "--template-arg",
        "preserve_thinking=true",
        "--chat",
        "--max-tokens",
        "1",
    ]
    outcome = edgeinfer("run", "tiny", "Hi", "--chat-template", str(path), *options)
    assert outcome.code == 1
    assert "Hi True high True" in outcome.err
