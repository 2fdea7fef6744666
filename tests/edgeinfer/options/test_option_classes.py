"""Options: keywords and their types are derived from one field."""

import subprocess
import sys
import typing
from pathlib import Path
from typing import Any

import pytest
from mypy import api

import edgeinfer
from edgeinfer.errors import SettingError
from edgeinfer.options import (
    ChatKeywords,
    EndpointKeywords,
    GenerateKeywords,
    LoadKeywords,
    LoadOptions,
    RunKeywords,
    RunOptions,
    SamplingKeywords,
    SamplingParams,
)
from edgeinfer.options.option_field import default_of, options_of, types_of, without_none
from edgeinfer.options.run_options import COUNTS, PROMPT_FORMAT, run_options

ROOT = Path(__file__).resolve().parents[3]
RUN_NAMES = {*options_of(RunOptions), *options_of(SamplingParams)}
KEYWORDS: dict[Any, set[str]] = {
    LoadKeywords: set(options_of(LoadOptions)) - {"base_url", "key"},
    EndpointKeywords: {"engine", "base_url", "key", "context", "thinking", "template_args"},
    SamplingKeywords: set(options_of(SamplingParams)),
    ChatKeywords: RUN_NAMES - {*COUNTS, *PROMPT_FORMAT},
    RunKeywords: RUN_NAMES - set(COUNTS),
    GenerateKeywords: RUN_NAMES - {"n"},
}
SCRIPT = """
import edgeinfer

with edgeinfer.load("tiny", context=512, vram="8GiB") as model:
    print(model.generate("Once", max_tokens=3, temperature=0.0).text)
    print([answer.text for answer in model.generate("Once", n=2, best_of=4)])
    for token in model.stream("Once", top_k=3, stop=["end"]):
        print(token.text)
    chat = model.chat(system="Be brief.", temperature=0.5)
    print(chat.say("Hi", max_tokens=3).text, edgeinfer.tokenizer.Tokenizer)
"""


@pytest.mark.parametrize("keywords", KEYWORDS, ids=lambda keywords: keywords.__name__)
def test_typed_keywords_are_the_fields_of_the_options(keywords: Any) -> None:
    assert set(typing.get_type_hints(keywords)) == KEYWORDS[keywords]


@pytest.mark.parametrize(
    ("keywords", "kind"),
    [(LoadKeywords, LoadOptions), (SamplingKeywords, SamplingParams), (GenerateKeywords, RunOptions)],
)
def test_a_keyword_without_conversion_has_the_type_of_its_field(keywords: Any, kind: type) -> None:
    hints = typing.get_type_hints(keywords)
    for name, info in options_of(kind).items():
        if info.convert is None and name in hints and name != "engine":  # a server has other keywords
            assert hints[name] == types_of(kind)[name], name
        elif name in hints:
            assert without_none(hints[name])[0] is not None, name


def errors_of(script: str, folder: Path) -> list[str]:
    """The errors of mypy --strict on a script."""
    path = folder / "script.py"
    path.write_text(script, encoding="utf-8")
    options = ["--strict", "--no-incremental", "--follow-imports=silent", "--config-file", "", str(path)]
    out, err, _ = api.run(options)
    assert err == ""
    return [line for line in out.splitlines() if "error:" in line]


@pytest.mark.slow
def test_mypy_accepts_the_public_keywords_and_finds_a_misspelled_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    roots = [ROOT, *(ROOT / folder for folder in ("kernels", "offload", "quant_formats"))]
    monkeypatch.setenv("MYPYPATH", ":".join(map(str, roots)))
    wrong = SCRIPT + "\n".join(
        [
            '    model.generate("Once", temprature=1.0)',
            '    model.stream("Once", top_k="many")',
            '    chat.say("Hi", temprature=1.0)',
            '    edgeinfer.load("tiny", contxt=1)',
        ]
    )
    result = errors_of(wrong, tmp_path)
    first = len(SCRIPT.splitlines()) + 1
    assert {int(line.split(":")[1]) for line in result} == set(range(first, first + 4)), result


@pytest.mark.parametrize("name", [name for name in options_of(SamplingParams) if name != "seed"])
def test_the_page_of_the_samplers_names_every_one_with_its_default(name: str) -> None:
    page = next((ROOT / "docs").rglob("sampling.md")).read_text(encoding="utf-8")
    default = default_of(SamplingParams, name)
    shown = (
        " ".join(f"`{text}`".replace("\n", "\\n") for text in default) if name.endswith("ers") else default
    )
    assert f"`{name}` {shown}" in page


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temprature": 1.0}, "temprature: no such option; did you mean temperature?"),
        ({"max_token": 1}, "max_token: no such option; did you mean max_tokens?"),
        (
            {"context_overflow": "slide"},
            "context_overflow: saw 'slide', wanted one of 'stop', 'shift', 'h2o'",
        ),
        ({"max_tokens": -1}, "max_tokens: saw -1, wanted a whole number of at least 0, or None"),
        ({"logprobs": "2"}, "logprobs: saw '2', wanted a whole number of at least 0, or None"),
        ({"raw": 1}, "raw: saw 1, wanted True or False"),
        ({"progress": 1}, "progress: saw 1, wanted a function, or None"),
    ],
)
def test_a_wrong_keyword_of_a_completion_is_named(given: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingError) as caught:
        run_options(given)
    assert str(caught.value) == message


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"contxt": 1}, "contxt: no such option; did you mean context?"),
        ({"vram": "much"}, "vram: saw 'much', wanted bytes or a size like \"8GiB\""),
        ({"draft_tree_width": 9}, "draft_tree_width: saw 9, wanted a whole number from 0 to 8"),
        (
            {"kv": "f8"},
            "kv: saw 'f8', wanted one of 'f32', 'f16', 'fp8', 'q8_0', 'q4_0', or two of them for "
            "keys and values, as 'q8_0/q4_0'; +f16 after one of few bits: with recent positions in f16",
        ),
        (
            {"kv": "f32/f16+f16"},
            "kv: saw 'f32/f16+f16', wanted one of 'f32', 'f16', 'fp8', 'q8_0', 'q4_0', or two of them for "
            "keys and values, as 'q8_0/q4_0'; +f16 after one of few bits: with recent positions in f16",
        ),
        ({"lookup_files": 5}, "lookup_files: saw 5, wanted paths of text files"),
        (
            {"engine": "llama.cpp", "repack": False},
            "repack: llama.cpp decides it; leave out repack, or the engine",
        ),
    ],
)
def test_a_wrong_keyword_of_load_is_named(given: Any, message: str) -> None:
    with pytest.raises(SettingError) as caught:
        edgeinfer.load("tiny", **given)
    assert str(caught.value) == message


def test_the_options_and_the_package_import_neither_numpy_nor_the_engine() -> None:
    code = (
        "import sys, edgeinfer, edgeinfer.options\n"
        "print([name for name in ('numpy', 'edgeinfer.model') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert done.stdout.strip() == "[]"


def test_public_names_are_found_on_first_access() -> None:
    for name in edgeinfer.__all__:
        assert getattr(edgeinfer, name) is not None, name
    with pytest.raises(AttributeError, match="module 'edgeinfer' has no attribute 'nothing'"):
        edgeinfer.__getattr__("nothing")


def test_a_pydantic_class_is_its_json_schema() -> None:
    pydantic = pytest.importorskip("pydantic")
    hero = pydantic.create_model("Hero", name=(str, ...), age=(int, 3))
    assert run_options({"schema": hero})[0].schema == hero.model_json_schema()
    assert run_options({"schema": {"type": "object"}})[0].schema == {"type": "object"}
