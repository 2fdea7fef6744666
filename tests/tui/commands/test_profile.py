"""`edgeinfer profile`: what it prints, saves and refuses."""

import json
from pathlib import Path

import pytest

from tests.model_zoo import ZOO
from tests.tui.conftest import CommandLine

LICENSE = str(Path(__file__).parents[3] / "LICENSE")


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return str(ZOO["arcee"].write(tmp_path / "m.gguf"))


def test_the_report_has_a_row_for_each_layer(edgeinfer: CommandLine, model: str) -> None:
    outcome = edgeinfer("profile", model, "--text", LICENSE, "--tokens", "128")
    assert outcome.code == 0
    lines = [" ".join(line.split()) for line in outcome.out.splitlines()]
    assert lines[0] == "layer units active hottest 10% hottest 20% hottest 30% hottest 50% hot set"
    assert [line.split()[0] for line in lines[1:5]] == ["0", "1", "2", "all"]
    assert lines[5] == "active: not exactly zero; counted over 64 tokens, checked on 64 others"
    assert lines[6] == "as many at random would cover 10%, 20%, 30%, 50%"
    assert f"edgeinfer: saved in {model}.profile.npz" in outcome.err
    assert Path(f"{model}.profile.npz").exists()


def test_json_includes_predictors(edgeinfer: CommandLine, model: str) -> None:
    outcome = edgeinfer(
        "profile", model, "--text", LICENSE, "--tokens", "256", "--predictor", "--rank", "32", "--json"
    )
    report = json.loads(outcome.out)
    assert report["tokens"] == [128, 128]
    assert len(report["layers"]) == 3
    assert set(report["layers"][0]["predictor"]) == {"rank", "bytes", "recall", "named_share"}
    assert 0 < report["overall"]["active_share"] < 1
    assert list(report["overall"]["covered_by_hottest"]) == ["10%", "20%", "30%", "50%"]


def test_an_invalid_profile_run_gives_a_one_line_error(
    edgeinfer: CommandLine, model: str, tmp_path: Path
) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"text\xff")
    outcome = edgeinfer("profile", model, "--text", str(binary))
    assert outcome.code == 2
    assert f"--text {binary}: byte 4 isn't UTF-8" in outcome.err
    short = tmp_path / "short"
    short.write_text("he")
    outcome = edgeinfer("profile", model, "--text", str(short))
    assert outcome.code == 1
    assert "wanted at least 64; give a longer one" in outcome.err
    assert "\n" not in outcome.err.strip()


def test_an_importance_matrix_is_written_and_quantize_reads_it(
    edgeinfer: CommandLine, model: str, tmp_path: Path
) -> None:
    out = str(tmp_path / "imatrix.gguf")
    outcome = edgeinfer("profile", model, "--imatrix", LICENSE, "-o", out, "--tokens", "512")
    assert outcome.code == 0
    assert f"edgeinfer: wrote the importance of 18 tensors to {out}" in outcome.err
    small = str(tmp_path / "small.gguf")
    assert edgeinfer("quantize", model, small, "--type", "Q4_0", "--imatrix", out).code == 0
    outcome = edgeinfer("profile", model, "--imatrix", LICENSE)
    assert outcome.code == 2
    assert "--imatrix TEXT and -o OUT belong together" in outcome.err


def test_a_profile_can_be_removed(edgeinfer: CommandLine, model: str) -> None:
    path = Path(f"{model}.profile.npz")
    edgeinfer("profile", model, "--text", LICENSE, "--tokens", "128")
    assert path.exists()
    assert edgeinfer("profile", model, "--remove").err == f"edgeinfer: removed {path}\n"
    assert not path.exists()
    path.write_bytes(b"damaged")
    assert edgeinfer("profile", model, "--remove").err == f"edgeinfer: removed {path}\n"
    assert edgeinfer("profile", model, "--remove").err == "edgeinfer: m has no profile\n"
