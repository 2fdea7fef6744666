"""`edgeinfer run` with a prompt: what goes to stdout, what to stderr, and every way to fail."""

import io
import json
from pathlib import Path
from typing import Any

import pytest

from edgeinfer_tui import library, prompt_source
from edgeinfer_tui.interrupts import INTERRUPTED
from tests.tui.conftest import CommandLine
from tests.tui.fake_library import ANSWER, FakeModel


class Input(io.TextIOWrapper):
    """Standard input with these bytes."""

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content), encoding="utf-8")


@pytest.fixture(autouse=True)
def empty_input(monkeypatch: pytest.MonkeyPatch) -> None:
    pipe_in(monkeypatch, b"")


def pipe_in(monkeypatch: pytest.MonkeyPatch, content: bytes) -> None:
    monkeypatch.setattr("sys.stdin", Input(content))
    monkeypatch.setattr(prompt_source, "has_input_within", lambda raw, seconds: True)


def test_only_the_completion_is_on_stdout(edgeinfer: CommandLine, fake: FakeModel) -> None:
    outcome = edgeinfer("run", "tiny", "Once upon a time")
    assert (outcome.code, outcome.out, outcome.err) == (0, ANSWER + "\n", "")
    assert fake.prompts == ["raw Once upon a time"]
    assert fake.closed


@pytest.mark.parametrize("blank", ["   ", "\n\t"])
def test_a_blank_prompt_gives_one_line(edgeinfer: CommandLine, fake: FakeModel, blank: str) -> None:
    outcome = edgeinfer("run", "tiny", blank)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith("edgeinfer: the prompt is blank; give a text, or none for a chat")
    assert fake.prompts == []


def test_many_completions_are_announced(edgeinfer: CommandLine, fake: FakeModel) -> None:
    assert edgeinfer("run", "tiny", "Hi", "-n", "8").err == ""
    outcome = edgeinfer("run", "tiny", "Hi", "-n", "40")
    assert outcome.err == "edgeinfer: 40 completions (-n); --max-tokens limits the tokens of each\n"


def test_the_default_model_is_the_built_in_one(
    edgeinfer: CommandLine, fake: FakeModel, monkeypatch: Any
) -> None:
    pipe_in(monkeypatch, b"Once")
    edgeinfer("run")
    assert fake.loaded_with == {"model": None}


def test_speed_prints_a_status_line_to_stderr(edgeinfer: CommandLine, fake: FakeModel) -> None:
    outcome = edgeinfer("run", "tiny", "Once", "--speed")
    assert outcome.out == ANSWER + "\n"
    assert outcome.err == (
        "ttft 0.21 s · prompt 312 t/s (9 tokens) · decode 54 t/s (4 tokens) · context 13/1024\n"
    )


def test_options_reach_the_library_by_keyword(
    edgeinfer: CommandLine, fake: FakeModel, tmp_path: Path
) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{{ messages }}")
    line = "--max-tokens 7 --temp 0 --seed 3 -c 512 --device cpu --vram 8GiB --ram 4GiB -t 2"
    samplers = "--draft none --kv f32 --top-k 5 --min-p 0.1 --dry-sequence-breaker \\n --mirostat 2"
    samplers += " --logit-bias 5=-inf --logit-bias 6=1.5"
    others = "--stop \\n\\n --stop END --engine llama.cpp --assume-pre-tokenizer qwen2 --logprobs 2"
    edgeinfer("run", "tiny", "Once", *f"{line} {samplers} {others} --chat-template {template}".split())
    assert fake.loaded_with == {
        "model": "tiny",
        "context": 512,
        "engine": "llama.cpp",
        "device": "cpu",
        "vram": "8GiB",
        "ram": "4GiB",
        "threads": 2,
        "draft": None,
        "kv": "f32",
        "chat_template": "{{ messages }}",
        "assume_pre_tokenizer": "qwen2",
    }
    assert fake.settings == [
        {
            "temperature": 0.0,
            "top_k": 5,
            "min_p": 0.1,
            "dry_sequence_breakers": ("\n",),
            "mirostat": 2,
            "logit_bias": {5: float("-inf"), 6: 1.5},
            "seed": 3,
            "max_tokens": 7,
            "logprobs": 2,
            "stop": ("\n\n", "END"),
        }
    ]


def test_lookup_files_reach_the_library_as_paths(
    edgeinfer: CommandLine, fake: FakeModel, tmp_path: Path
) -> None:
    paths = [tmp_path / name for name in ("one.py", "two.py")]
    for path in paths:
        path.write_text("pass\n")
    edgeinfer("run", "tiny", "Once", *(word for path in paths for word in ("--lookup-file", str(path))))
    assert fake.loaded_with == {"model": "tiny", "lookup_files": paths}


def test_several_completions_follow_one_another(edgeinfer: CommandLine, fake: FakeModel) -> None:
    outcome = edgeinfer("run", "tiny", "Once", "-n", "3", "--seed", "4", "--best-of", "5")
    assert outcome.out == f"{ANSWER}\n" * 3
    assert fake.settings == [{"seed": 4}]
    assert fake.counts == {"best_of": 5}
    edgeinfer("run", "tiny", "Once", "--beams", "2", "--chat", "--system", "Be kind.")
    assert fake.counts == {"beams": 2}
    messages = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Once"}]
    assert fake.prompts == ["Once", str(messages)]
    assert edgeinfer("run", "tiny", "Once", "-n", "0").code == 2


def test_omitted_options_use_the_defaults_of_the_library(edgeinfer: CommandLine, fake: FakeModel) -> None:
    edgeinfer("run", "tiny", "Once")
    assert fake.loaded_with == {"model": "tiny"}
    assert fake.settings == [{}]


def test_a_prompt_is_a_chat_message_if_the_model_prefers_it(edgeinfer: CommandLine, fake: FakeModel) -> None:
    fake.prompt_style = None
    edgeinfer("run", "tiny", "Hi")
    edgeinfer("run", "tiny", "Hi", "--raw")
    fake.chat_format = None
    edgeinfer("run", "tiny", "Hi")
    assert fake.prompts == ["chat[None] Hi", "raw Hi", "raw Hi"]


def test_chat_and_system_apply_the_template(edgeinfer: CommandLine, fake: FakeModel) -> None:
    edgeinfer("run", "tiny", "Hi", "--chat")
    edgeinfer("run", "tiny", "Hi", "--system", "Be brief.")
    assert fake.prompts == ["chat[None] Hi", "chat[Be brief.] Hi"]


def test_a_chat_without_a_template_names_the_option(edgeinfer: CommandLine, fake: FakeModel) -> None:
    fake.chat_format = None
    outcome = edgeinfer("run", "tiny", "Hi", "--chat")
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err == (
        "edgeinfer: fake: the file holds no chat template; give --chat-template FILE, or use --raw\n"
    )


def test_piped_text_is_the_prompt_less_its_last_newline(
    edgeinfer: CommandLine, fake: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe_in(monkeypatch, "Es war einmal ein Mädchen\n".encode())
    edgeinfer("run", "tiny")
    assert fake.prompts == ["raw Es war einmal ein Mädchen"]


def test_piped_text_comes_before_the_prompt(
    edgeinfer: CommandLine, fake: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe_in(monkeypatch, b"a diff\nof two lines\n")
    edgeinfer("run", "tiny", "Explain this.")
    assert fake.prompts == ["raw a diff\nof two lines\n\nExplain this."]


def test_a_pipe_without_a_writer_is_ignored(
    edgeinfer: CommandLine, fake: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompt_source, "has_input_within", lambda raw, seconds: False)
    outcome = edgeinfer("run", "tiny", "Hi")
    assert fake.prompts == ["raw Hi"]
    assert outcome.err == ("edgeinfer: standard input had no data within 5 s: using the prompt alone\n")


def test_undecodable_input_is_a_usage_error(
    edgeinfer: CommandLine, fake: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe_in(monkeypatch, b"abc\xff")
    outcome = edgeinfer("run", "tiny")
    assert outcome.code == 2
    assert outcome.err.startswith("edgeinfer: standard input: byte 3 isn't UTF-8, wanted a text in UTF-8")


def test_logprobs_go_to_stderr(edgeinfer: CommandLine, fake: FakeModel) -> None:
    outcome = edgeinfer("run", "tiny", "Hi", "--logprobs", "2")
    assert outcome.out == ANSWER + "\n"
    assert outcome.err.splitlines()[0] == "      0  -0.5000 'There '  ['a' -0.5000  'b' -1.5000]"


def test_verbose_shows_plan_and_settings(edgeinfer: CommandLine, fake: FakeModel) -> None:
    outcome = edgeinfer("run", "tiny", "Hi", "-v", "--seed", "3")
    assert "edgeinfer: given: seed 3\nedgeinfer: drafting with a small model\n" in outcome.err
    # After the text, because it measures the kernels.
    assert outcome.err.endswith("everything lies in RAM\n")
    assert outcome.err.startswith("edgeinfer: a warning of loading\nedgeinfer: fake loaded in ")
    assert "context 1024 tokens" in outcome.err


def test_weights_can_be_memory_mapped(edgeinfer: CommandLine, fake: FakeModel) -> None:
    assert "given: repack False\n" in edgeinfer("run", "tiny", "Hi", "-v", "--no-repack").err
    assert "given: repack True\n" in edgeinfer("run", "tiny", "Hi", "-v", "--repack").err


def test_an_interrupted_response_keeps_the_text(edgeinfer: CommandLine, fake: FakeModel) -> None:
    fake.options["interrupt_after"] = 2
    outcome = edgeinfer("run", "tiny", "Hi", "--speed")
    assert (outcome.code, outcome.out) == (INTERRUPTED, "There was \n")
    assert outcome.err.endswith("context 11/1024 · stopped by you\n")
    assert fake.closed


def test_an_interrupt_while_loading_is_quiet(edgeinfer: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(library, "load_model", load)
    outcome = edgeinfer("run", "tiny", "Hi")
    assert (outcome.code, outcome.out, outcome.err) == (INTERRUPTED, "", "")


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (
            ["run", "Once upon a time"],
            1,
            '"Once upon a time" reads like a prompt, but the model comes first: edgeinfer run tiny "Once',
        ),
        (["run", "tinny", "Hi"], 1, "tinny: no such model; did you mean tiny?"),
        (["run", "tinny"], 1, "tinny: no such model; did you mean tiny?"),
        (["run", "tiny", "overflow"], 1, "prompt: 2000 tokens, wanted at most 1024"),
        (
            ["run", "tiny", "explode"],
            1,
            "unexpected ZeroDivisionError: float division by zero (a bug in edgeinfer; set EDGEINFER_DEBUG=1",
        ),
        (["run", "tiny"], 2, "no prompt, and standard input is empty; try: edgeinfer run tiny"),
        (["run", "tiny", "Hi", "--tempo", "1"], 2, "No such option: --tempo"),
        (["run", "tiny", "Hi", "-t", "hot"], 2, "--threads: saw 'hot', wanted a whole number"),
        (
            ["run", "tiny", "Hi", "--max-tokens", "-2"],
            2,
            "--max-tokens: saw -2, wanted a whole number of at least 0 (see ",
        ),
        (
            ["run", "tiny", "Hi", "--raw", "--system", "x"],
            2,
            "--system needs the chat template, which --raw",
        ),
        (
            ["run", "tiny", "Hi", "--logit-bias", "5:1"],
            2,
            "--logit-bias: saw '5:1', wanted ID=BIAS with a token id",
        ),
        (["run", "tiny", "Hi", "--kv", "q9"], 2, "--kv: saw 'q9', wanted one of"),
        (["nope"], 2, "No such command 'nope'"),
    ],
)
def test_an_error_is_one_line_and_an_exit_code(
    edgeinfer: CommandLine, fake: FakeModel, arguments: list[str], code: int, message: str
) -> None:
    outcome = edgeinfer(*arguments)
    assert (outcome.code, outcome.out) == (code, "")
    assert outcome.err.startswith(f"edgeinfer: {message}")
    assert outcome.err.count("\n") == 1


def test_a_traceback_is_printed_on_request(
    edgeinfer: CommandLine, fake: FakeModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("EDGEINFER_DEBUG", "1")
    outcome = edgeinfer("run", "tiny", "explode")
    assert outcome.err.startswith("Traceback (most recent call last)")
    assert outcome.err.endswith("(a bug in edgeinfer; see above)\n")


def test_errors_in_json_mode_are_json(edgeinfer: CommandLine) -> None:
    assert json.loads(edgeinfer("list", "--json").out)[0]["name"] == "tiny"


def test_a_schema_and_a_grammar_come_from_files(
    edgeinfer: CommandLine, fake: FakeModel, tmp_path: Path
) -> None:
    schema, grammar = tmp_path / "person.json", tmp_path / "answer.gbnf"
    schema.write_text('{"type": "string"}')
    grammar.write_text('root ::= "yes"')
    assert edgeinfer("run", "tiny", "Hi", "--json-schema", str(schema)).code == 0
    assert fake.settings[-1]["schema"] == '{"type": "string"}'
    assert edgeinfer("run", "tiny", "Hi", "--grammar", str(grammar)).code == 0
    assert fake.settings[-1]["grammar"] == 'root ::= "yes"'
    grammar.write_bytes(b"root\xff")
    outcome = edgeinfer("run", "tiny", "Hi", "--grammar", str(grammar))
    assert outcome.code == 2
    assert f"--grammar {grammar}: byte 4 isn't UTF-8" in outcome.err


def test_adapters_reach_the_library_with_their_scales(edgeinfer: CommandLine, fake: FakeModel) -> None:
    edgeinfer("run", "tiny", "Once", "--lora", "a.gguf", "--lora", "b:0.5")
    assert fake.loaded_with == {"model": "tiny", "lora": ["a.gguf", "b:0.5"]}
