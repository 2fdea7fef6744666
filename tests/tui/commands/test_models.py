"""`edgeinfer show` and `edgeinfer list`."""

import json
import re
from pathlib import Path

import pytest

from edgeinfer.registry import registry
from edgeinfer_tui.commands import models_command
from tests.tui.conftest import CommandLine


def test_show_lists_the_contents_of_the_file(edgeinfer: CommandLine) -> None:
    outcome = edgeinfer("show", "tiny")
    assert (outcome.code, outcome.err) == (0, "")
    lines = [" ".join(line.split()) for line in outcome.out.splitlines()]
    assert "architecture arcee" in lines
    assert "parameters 31.7M (31,730,176, 5.14 bits each)" in lines
    assert "vocabulary 8192 tokens, gpt2 (gpt-2)" in lines
    assert "tokenizer byte pairs" in lines
    assert "Q4_K 50 21,954,560 12,349,440 4.5 60.5%" in lines
    assert "tokenizer.ggml.tokens 8192 values: '<|endoftext|>', '<|system|>', '<|user|>', ..." in lines
    assert "Tensors (rows x columns)" not in lines
    assert max(map(len, lines)) < 180


def test_show_tensors_lists_every_tensor(edgeinfer: CommandLine) -> None:
    lines = [" ".join(line.split()) for line in edgeinfer("show", "--tensors").out.splitlines()]
    assert "blk.9.ffn_up.weight Q4_K 2048 x 512 589,824" in lines
    assert sum(line.startswith("blk.") for line in lines) == 80


def test_show_json_has_the_same_values(edgeinfer: CommandLine) -> None:
    report = json.loads(edgeinfer("show", "tiny", "--json").out)
    assert report["parameters"] == 31_730_176
    assert report["vocabulary"]["tokenizer"] == "byte pairs"
    assert report["tensor_types"]["Q6_K"]["tensors"] == 11
    assert sum(row["share"] for row in report["tensor_types"].values()) == pytest.approx(1)
    assert report["metadata"]["tokenizer.ggml.merges"]["count"] == 7931
    assert "tensors" not in report
    assert len(json.loads(edgeinfer("show", "--json", "--tensors").out)["tensors"]) == 82


def test_show_of_an_invalid_file_gives_a_one_line_error(edgeinfer: CommandLine, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"no model at all, but long enough")
    outcome = edgeinfer("show", str(broken))
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err.startswith(f"edgeinfer: {broken}: ")
    assert outcome.err.count("\n") == 1


def test_list_has_the_built_in_model_first(
    edgeinfer: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))  # of Windows
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    (tmp_path / "edgeinfer/models").mkdir(parents=True)
    (tmp_path / "edgeinfer/models/own.gguf").write_bytes(b"GGUF")
    rows = [line.split() for line in edgeinfer("list").out.splitlines()]
    assert rows[0] == ["NAME", "PARAMETERS", "TYPE", "SIZE", "LAST", "USED", "FITS", "FROM", "NOTES"]
    assert rows[1][:5] == ["tiny", "30M", "Q4_K_M", "19.7", "MiB"]
    assert "yes," in rows[1]
    assert rows[2][0] == "own"
    assert "?" in rows[2]
    listed = json.loads(edgeinfer("list", "--json").out)
    assert [model["name"] for model in listed] == ["tiny", "own"]
    assert (listed[0]["licence"], listed[0]["fits"], listed[1]["fits"]) == ("CC-BY-4.0", True, None)


LAPTOP = ("--device", "rtx 4060 laptop, 32GiB ram")
LISTED = ("llama-3.3-70b", "qwen3-32b", "qwen3-4b", "qwen3-8b")


@pytest.fixture
def pulled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A home folder with a damaged file of Qwen3 8B."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))  # of Windows
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    path = tmp_path / "edgeinfer/models/Qwen/Qwen3-8B-GGUF/Qwen3-8B-Q6_K.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"GGUF")


@pytest.mark.usefixtures("pulled")
def test_list_all_shows_the_registry(edgeinfer: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    """With four of its models: planning all takes seconds."""
    entries = registry.read_registry()
    monkeypatch.setattr(registry, "read_registry", lambda: {name: entries[name] for name in LISTED})
    outcome = edgeinfer("list", "--all", *LAPTOP)
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    rows = {line.split()[0]: " ".join(line.split()) for line in lines if line}
    assert lines[0].split() == ["NAME", "SIZE", "FITS", "TOKENS/S", "HERE", "NOTES"]
    assert rows["qwen3-8b"].startswith("qwen3-8b 4 B - - yes reasoning")
    assert re.match(r"qwen3-4b 2\.3 GiB on the GPU \d+ reasoning; strong", rows["qwen3-4b"])
    assert re.match(r"qwen3-32b ~18\.4 GiB split \d\.?\d? the largest dense", rows["qwen3-32b"])
    assert rows["llama-3.3-70b"].startswith("llama-3.3-70b ~39.6 GiB no - close to the best")
    order = [line.split()[0] for line in lines[1:] if line]
    assert order.index("qwen3-4b") < order.index("qwen3-32b") < order.index("llama-3.3-70b")


@pytest.mark.slow
@pytest.mark.usefixtures("pulled")
def test_list_all_gives_the_registry_as_json(edgeinfer: CommandLine) -> None:
    outcome = edgeinfer("list", "--all", *LAPTOP, "--json")
    listed = {model["name"]: model for model in json.loads(outcome.out)}
    assert len(listed) > 30
    assert (listed["qwen3-8b"]["here"], listed["qwen3-4b"]["here"]) == (True, False)
    assert listed["qwen3-8b"]["files"]["Q6_K"] == "Qwen3-8B-Q6_K.gguf"
    assert (listed["qwen3-4b"]["parameters"], listed["qwen3-4b"]["context"]) == ("4B", 40960)
    assert (listed["qwen3-4b"]["placement"], listed["qwen3-4b"]["size_is_computed"]) == ("gpu", False)
    assert listed["llama-3.3-70b"]["fits"] is False
    assert listed["qwen3-8b"]["fits"] is None


@pytest.mark.slow
def test_list_all_for_this_machine_fits_a_terminal(
    edgeinfer: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))  # of Windows
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(models_command, "on_terminal", lambda stream: True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "nothing measured"))
    outcome = edgeinfer("list", "--all")
    assert outcome.err.startswith(
        "edgeinfer: speeds assume 20 GB/s of memory: this machine isn't measured yet"
    )
    lines = outcome.out.splitlines()
    assert max(map(len, lines)) <= 80
    start = lines[0].index("FITS")
    cells = {line[start : lines[0].index("TOKENS/S")].strip() for line in lines[1 : lines.index("")]}
    assert {"on the CPU", "-"} <= cells <= {"on the GPU", "split", "on the CPU", "no", "-"}


def test_an_unknown_machine_gives_a_one_line_error(edgeinfer: CommandLine) -> None:
    outcome = edgeinfer("list", "--all", "--device", "rtx 9060")
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err.startswith("edgeinfer: --device: 'rtx 9060': no such card in the table; known are ")


def test_without_a_command_the_help_is_shown(edgeinfer: CommandLine) -> None:
    outcome = edgeinfer()
    assert outcome.code == 0
    assert 'edgeinfer run tiny "Once upon a time"' in outcome.out


def test_version(edgeinfer: CommandLine) -> None:
    assert edgeinfer("--version").out.startswith("edgeinfer ")


@pytest.mark.parametrize(
    "command", ["run", "bench", "eval", "show", "list", "quantize", "doctor", "pull", "rm"]
)
def test_every_command_has_a_help_text(edgeinfer: CommandLine, command: str) -> None:
    outcome = edgeinfer(command, "--help")
    assert outcome.code == 0
    assert f"Usage: edgeinfer {command}" in outcome.out
