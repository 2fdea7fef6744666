"""The programs in `training/` make a draft head that the model can use."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import edgeinfer
from edgeinfer.registry.registry import find_model

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("", "quant_formats", "kernels", "offload", "tui")


def run(program: str, *arguments: str) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(str(ROOT / folder) for folder in FOLDERS)}
    subprocess.run(
        [sys.executable, str(ROOT / "training" / program), *arguments],
        check=True,
        env=environment,
        capture_output=True,
    )


@pytest.mark.slow
def test_a_head_is_trained_continued_and_used(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    model, states = str(find_model("tiny").path), str(tmp_path / "states.npz")
    first, second = (str(tmp_path / f"{name}.gguf") for name in ("first", "second"))
    run("collect_states.py", "tiny", states, "--tokens", "2000", "--threads", "1")
    brief = ("--minutes", "0.002", "--neurons", "64", "--vocabulary", "256", "--threads", "1")
    run("train_draft_head.py", model, states, first, *brief, "--type", "F16")
    run("train_draft_head.py", model, states, second, *brief, "--begin", first, "--passes", "2")
    with edgeinfer.load("tiny", draft=second, device="cpu", threads=1, context=128) as loaded:
        assert loaded.speculator is not None
        assert loaded.speculator.drafter.name == "draft head"
        assert loaded.generate("Once upon a time", max_tokens=8, temperature=0.0).ids
