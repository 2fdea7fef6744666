"""The programs in `training/` make a draft head that the model can use."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import edgeinfer
from edgeinfer.registry.registry import find_model
from edgeinfer_quant_formats import decode, encode

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


def test_a_rounded_matrix_is_what_a_file_has(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    monkeypatch.syspath_prepend(str(ROOT / "training"))
    draft_head = importlib.import_module("draft_head")
    values = torch.from_numpy(np.random.default_rng(1).normal(size=(16, 256)).astype(np.float32))
    values[3, 32:64] = 0
    values.requires_grad_()
    rounded = draft_head.rounded(values)
    assert np.array_equal(rounded.detach().numpy(), in_file(values.detach().numpy(), draft_head.ROUNDED))
    rounded.sum().backward()
    assert torch.equal(values.grad, torch.ones_like(values))


def in_file(values: np.ndarray, kind: str) -> np.ndarray:
    """The values after they were written in a type."""
    return decode(encode(values, kind), kind).reshape(values.shape)


@pytest.mark.slow
def test_a_head_is_trained_continued_and_used(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    model, texts = str(find_model("tiny").path), str(tmp_path / "texts.npz")
    first, second = (str(tmp_path / f"{name}.gguf") for name in ("first", "second"))
    run("write_texts.py", model, texts, "--tokens", "512", "--row", "32", "--together", "16")
    ids = np.load(texts)["ids"]
    assert ids.shape == (16, 32)
    assert len({*ids[:, -1].tolist()}) > 1
    sizes = ("--neurons", "64", "--vocabulary", "256", "--passes", "2")
    floats = ("--type", "F16", "--output-type", "F16")
    run("train_draft_head.py", model, first, texts, texts, "--steps", "2", *sizes, *floats)
    small = ("--begin", first, "--type", "Q4_0", "--output-type", "Q4_0")
    run("train_draft_head.py", model, second, texts, "--steps", "1", *sizes, *small)
    with edgeinfer.load("tiny", draft=second, device="cpu", threads=1, context=128) as loaded:
        assert loaded.speculator is not None
        assert loaded.speculator.drafter.name == "draft head"
        assert loaded.generate("Once upon a time", max_tokens=8, temperature=0.0).ids
