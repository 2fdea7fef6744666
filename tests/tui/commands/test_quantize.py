"""`edgeinfer quantize`."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edgeinfer_quant_formats import GGUFFile, GGUFWriter
from edgeinfer_quant_formats.quantizer.mixes import MIXES
from tests.model_zoo import ZOO
from tests.tui.conftest import CommandLine


def write_model(path: Path, rows: int = 8) -> Path:
    weights = np.random.default_rng(81).standard_normal((rows, 256)).astype(np.float32)
    with GGUFWriter(path, {"general.architecture": "llama", "llama.block_count": 1}) as writer:
        writer.add_tensor("output_norm.weight", np.ones(256, np.float32), "F32")
        writer.add_tensor("blk.0.attn_q.weight", weights, "F16")
    return path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_model(tmp_path / "model-F16.gguf")


def test_help_lists_every_type(edgeinfer: CommandLine) -> None:
    words = edgeinfer("quantize", "--help").out.split()
    assert set(MIXES) <= set(words)


def test_a_smaller_file_is_written_and_reported_on_stderr(
    edgeinfer: CommandLine, source: Path, tmp_path: Path
) -> None:
    target = tmp_path / "small.gguf"
    outcome = edgeinfer("quantize", str(source), str(target))
    assert (outcome.code, outcome.out) == (0, "")
    assert outcome.err.startswith(
        f"edgeinfer: {target}: Q4_K_M, 5.0 KiB -> 2.1 KiB, 7.56 bits per weight, in "
    )
    with GGUFFile.open(target) as file:
        assert file.tensors["blk.0.attn_q.weight"].format.name == "Q4_K"


def test_bundles_are_written_for_the_new_file_or_alone_for_the_old_one(
    edgeinfer: CommandLine, tmp_path: Path
) -> None:
    source = replace(ZOO["arcee"], width=256, feed_forward=512, formats=("F16",)).write(tmp_path / "m.gguf")
    target = tmp_path / "small.gguf"
    outcome = edgeinfer("quantize", str(source), str(target), "--type", "Q8_0", "--bundle")
    assert (outcome.code, outcome.out) == (0, "")
    assert outcome.err.splitlines()[-1].startswith(f"edgeinfer: {target}.bundles: ")
    written = Path(f"{target}.bundles").read_bytes()
    Path(f"{target}.bundles").unlink()
    outcome = edgeinfer("quantize", str(target), "--bundle")
    assert (outcome.code, len(outcome.err.splitlines())) == (0, 1)
    assert Path(f"{target}.bundles").read_bytes() == written
    outcome = edgeinfer("quantize", str(source), "--bundle")
    assert outcome.code == 1
    assert "can be read by neurons" in outcome.err


def test_a_dry_run_prints_the_format_of_each_tensor(edgeinfer: CommandLine, source: Path) -> None:
    outcome = edgeinfer("quantize", str(source), "--type", "q8_0", "--dry-run")
    assert (outcome.code, outcome.err) == (0, "")
    assert [line.split() for line in outcome.out.splitlines()] == [
        ["TENSOR", "ROWS", "x", "COLUMNS", "FROM", "TO", "BYTES"],
        ["output_norm.weight", "256", "F32", "-", "1,024"],
        ["blk.0.attn_q.weight", "8", "x", "256", "F16", "Q8_0", "2,176"],
        [],
        ["Q8_0:", "5.0", "KiB", "->", "3.1", "KiB,", "11.11", "bits", "per", "weight"],
    ]
    assert [path.name for path in source.parent.iterdir()] == [source.name]


def test_json_has_the_same_values(edgeinfer: CommandLine, source: Path) -> None:
    outcome = edgeinfer("quantize", str(source), "--dry-run", "--json", "--tensor", "attn_.=Q6_K")
    report = json.loads(outcome.out)
    assert report["type"] == "Q4_K_M"
    assert report["tensors"][1] == {
        "name": "blk.0.attn_q.weight", "shape": [8, 256], "from": "F16", "to": "Q6_K", "bytes": 1680,
    }  # fmt: skip
    assert (report["target"], report["target_bytes"], report["warnings"]) == (None, 2704, [])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--type", "Q9"], "--type: type Q9 is unknown; wanted one of F32, F16"),
        (["--tensor", "Q8_0"], "--tensor: saw 'Q8_0', wanted PATTERN=TYPE, as ffn_down=Q6_K"),
        (["--threads", "0"], "--threads: saw 0, wanted a whole number of at least 1"),
        ([], "OUT is missing: the file to write"),
    ],
)
def test_an_invalid_command_line_gives_a_one_line_error(
    edgeinfer: CommandLine, source: Path, arguments: list[str], message: str
) -> None:
    outcome = edgeinfer("quantize", str(source), *arguments)
    assert (outcome.code, outcome.out) == (2, "")
    assert outcome.err.startswith(f"edgeinfer: {message}")
    assert outcome.err.count("\n") == 1


def test_a_refusal_gives_one_line_that_names_the_option(edgeinfer: CommandLine, source: Path) -> None:
    target = source.with_name("small.gguf")
    target.write_bytes(b"old")
    outcome = edgeinfer("quantize", str(source), str(target))
    assert outcome.code == 1
    assert outcome.err == (f"edgeinfer: {target}: is there already; replace it with --force\n")
    assert edgeinfer("quantize", str(source), str(target), "--force").code == 0


def test_warnings_go_to_stderr(edgeinfer: CommandLine, source: Path) -> None:
    outcome = edgeinfer("quantize", str(source), "--type", "Q2_K_S", "--dry-run")
    assert (
        outcome.err == "edgeinfer: Q2_K_S is made for an importance matrix (--imatrix); expect a poor model\n"
    )


@pytest.mark.slow
@pytest.mark.skipif(os.name != "posix", reason="needs signals")
def test_ctrl_c_ends_it_and_leaves_no_file(tmp_path: Path) -> None:
    source = write_model(tmp_path / "model-F16.gguf", rows=1 << 15)
    command = "from edgeinfer_tui.command_line import main; main()"
    process = subprocess.Popen(
        [sys.executable, "-c", command, "quantize", str(source), str(tmp_path / "small.gguf")],
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    )
    deadline = time.monotonic() + 30
    while not list(tmp_path.glob(".small.gguf.*.partial")) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert (process.returncode, err) == (130, "")
    assert [path.name for path in tmp_path.iterdir()] == [source.name]


def test_a_folder_is_converted_and_a_file_is_not(
    edgeinfer: CommandLine, source: Path, tmp_path: Path
) -> None:
    outcome = edgeinfer("convert", str(source), str(tmp_path / "out.gguf"))
    assert (outcome.code, outcome.out) == (1, "")
    assert outcome.err == f"edgeinfer: {source}: is a GGUF file already; to change its type, quantize it\n"
    empty = tmp_path / "empty"
    empty.mkdir()
    outcome = edgeinfer("convert", str(empty), str(tmp_path / "out.gguf"))
    assert outcome.code == 1
    assert "a folder without a .gguf file, or config.json and safetensors" in outcome.err
    assert "FOLDER" in edgeinfer("convert", "--help").out


def test_a_goal_selects_the_types(
    edgeinfer: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model, text = ZOO["llama"].write(tmp_path / "m.gguf"), tmp_path / "text"
    text.write_text("the heron ate in the rain on a stone " * 20)
    outcome = edgeinfer("quantize", str(model), "--bpw", "6", "--text", str(text), "--dry-run", "--json")
    report = json.loads(outcome.out)
    assert report["type"] == "fitted"
    assert 5.7 < report["bits_per_weight"] <= 6
    outcome = edgeinfer("quantize", str(model), "--bpw", "6", "--type", "Q4_0", "--dry-run")
    assert outcome.code == 1
    assert "saw 6 bits per weight and types by name; drop one of them" in outcome.err


def test_the_hessian_of_a_text_rounds_the_weights(edgeinfer: CommandLine, tmp_path: Path) -> None:
    model, text = ZOO["llama"].write(tmp_path / "m.gguf"), tmp_path / "text"
    text.write_text("the heron ate in the rain on a stone " * 20)
    target = tmp_path / "out.gguf"
    outcome = edgeinfer("quantize", str(model), str(target), "--type", "Q4_0", "--calibrate", str(text))
    assert (outcome.code, outcome.out) == (0, "")
    assert f"edgeinfer: {target}: Q4_0, " in outcome.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.gguf", "out.gguf", "text"]


@pytest.mark.parametrize("options", [["--fit", "100KiB"], ["--type", "Q4_0", "--calibrate", __file__]])
def test_ctrl_c_in_a_long_run_says_that_the_same_command_resumes(
    edgeinfer: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    def interrupted(*places: object, **settings: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("edgeinfer.quantizing.quantize", interrupted)
    outcome = edgeinfer("quantize", "tiny", str(tmp_path / "out.gguf"), *options)
    assert outcome.code == 130
    assert outcome.err.strip() == (
        "edgeinfer: stopped; what is done is kept, the same edgeinfer quantize resumes with it"
    )
