"""`edgeinfer eval`: what it prints and refuses."""

import io
import json
from pathlib import Path

import pytest

from edgeinfer_tui.output.progress_line import ProgressLine, shown_time
from tests.tui.conftest import CommandLine

LICENSE = str(Path(__file__).parents[3] / "LICENSE")
QUICK = ("--text", LICENSE, "--context", "32", "--chunks", "2")


def test_perplexity_as_text(edgeinfer: CommandLine) -> None:
    outcome = edgeinfer("eval", "tiny", *QUICK)
    assert (outcome.code, outcome.err) == (0, "")
    lines = [" ".join(line.split()) for line in outcome.out.splitlines()]
    assert lines[0] == "tokens scored 30 in 2 windows of 32, the second half of each"
    assert lines[1].startswith("perplexity ")
    assert " ± " in lines[1]
    assert len(lines) == 2


def test_a_base_model_adds_divergences(edgeinfer: CommandLine) -> None:
    lines = [" ".join(line.split()) for line in edgeinfer("eval", *QUICK, "--base", "tiny").out.splitlines()]
    assert "perplexity / that of the base 1.000000 ± 0.000000" in lines
    assert "KL divergence, mean 0.000e+00 ± 0.000e+00" in lines
    assert "same most probable token 100.00% ± 0.00%" in lines


@pytest.mark.slow
def test_json_has_the_same_values(edgeinfer: CommandLine) -> None:
    report = json.loads(edgeinfer("eval", *QUICK, "--json").out)
    assert (report["tokens"], report["windows"], report["context"]) == (30, 2, 32)
    assert report["perplexity"]["value"] > 1
    assert report["divergence"] is None
    compared = json.loads(edgeinfer("eval", *QUICK, "--base", "tiny", "--json").out)["divergence"]
    assert compared["mean"] == {"value": 0.0, "error": 0.0}


@pytest.mark.llama_cpp
def test_llama_cpp_can_be_the_base(edgeinfer: CommandLine) -> None:
    pytest.importorskip("llama_cpp")
    compared = json.loads(edgeinfer("eval", *QUICK, "--base", "llama.cpp", "--threads", "1", "--json").out)[
        "divergence"
    ]
    assert 0 < compared["mean"]["value"] < 1e-2


def test_an_invalid_evaluation_gives_a_one_line_error(edgeinfer: CommandLine, tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"text\xff")
    short = tmp_path / "short.txt"
    short.write_text("Once upon a time")
    for arguments, code, message in (
        (("--text", str(binary)), 2, f"--text {binary}: byte 4 isn't UTF-8, wanted a text in UTF-8"),
        (("--text", str(short)), 1, "the text has 5 tokens, wanted at least 512 for one window"),
        (("--text", str(tmp_path / "none")), 2, "Invalid value for '--text': "),
        ((), 2, "Missing option '--text'"),
        ((*QUICK, "--base", "nowhere"), 1, "nowhere: no such model"),
    ):
        outcome = edgeinfer("eval", *arguments)
        assert (outcome.code, outcome.out) == (code, "")
        assert outcome.err.startswith(f"edgeinfer: {message}")
        assert outcome.err.count("\n") == 1


def test_progress_reports_the_time_left() -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    now = 0.0
    terminal = Terminal()
    line = ProgressLine("windows", terminal, lambda: now, time_left=True)
    now = 10.0
    line.update(0, 5)
    now = 20.0
    line.update(2, 5)
    assert terminal.getvalue() == "\r\x1b[Kwindows 0/5 (0%)\r\x1b[Kwindows 2/5 (40%), 30 s left"


@pytest.mark.parametrize(("seconds", "shown"), [(40, "40 s"), (600, "10 min"), (9000, "2.5 h")])
def test_a_remaining_time_is_rounded(seconds: float, shown: str) -> None:
    assert shown_time(seconds) == shown
