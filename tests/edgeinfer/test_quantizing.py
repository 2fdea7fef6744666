"""`edgeinfer.quantize`: its errors, its warnings, its output."""

import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest

import edgeinfer
from edgeinfer.errors import SettingError, UnknownModelError
from edgeinfer_quant_formats import GGUFFile, GGUFWriter

Formats = dict[str, str]


def write_model(path: Path, columns: int = 256, format: str = "F32") -> Path:
    random = np.random.default_rng(71)
    with GGUFWriter(path, {"general.architecture": "llama", "llama.block_count": 1}) as writer:
        writer.add_tensor("output_norm.weight", np.ones(columns, np.float32), "F32")
        for name in ("token_embd", "blk.0.attn_q", "blk.0.ffn_down"):
            writer.add_tensor(f"{name}.weight", random.standard_normal((8, columns)), format)
    return path


def write_importance(path: Path, columns: int = 256, **metadata: Any) -> Path:
    with GGUFWriter(path, {f"imatrix.{key}": value for key, value in metadata.items()}) as writer:
        name = "blk.0.attn_q.weight"
        writer.add_tensor(f"{name}.in_sum2", np.ones((1, columns), np.float32), "F32")
        writer.add_tensor(f"{name}.counts", np.ones((1, 1), np.float32), "F32")
    return path


def formats_of(path: Path) -> Formats:
    with GGUFFile.open(path) as file:
        return {name.removesuffix(".weight"): info.format.name for name, info in file.tensors.items()}


def test_a_model_is_written_in_the_requested_mix(tmp_path: Path) -> None:
    target = tmp_path / "small.gguf"
    done = edgeinfer.quantize(write_model(tmp_path / "m.gguf"), target, "q4_k_m")
    assert formats_of(target) == {
        "output_norm": "F32", "token_embd": "Q6_K", "blk.0.attn_q": "Q4_K", "blk.0.ffn_down": "Q6_K",
    }  # fmt: skip
    assert (done.target, done.warnings, done.plan.mix.name) == (target, (), "Q4_K_M")
    assert done.seconds > 0


def test_options_override_the_mix(tmp_path: Path) -> None:
    source, target = write_model(tmp_path / "m.gguf"), tmp_path / "small.gguf"
    edgeinfer.quantize(
        source, target, "Q4_0", overrides={"ATTN_[qk]": "q8_0", "attn": "F16"}, embedding_type="Q5_1"
    )
    result = formats_of(target)
    assert (result["blk.0.attn_q"], result["token_embd"], result["blk.0.ffn_down"]) == (
        "Q8_0",
        "Q5_1",
        "Q4_0",
    )
    edgeinfer.quantize(source, target, "Q4_0", pure=True, overwrite=True)
    assert set(formats_of(target).values()) == {"F32", "Q4_0"}


def test_a_dry_run_writes_nothing_and_needs_no_target(tmp_path: Path) -> None:
    done = edgeinfer.quantize(write_model(tmp_path / "m.gguf"), None, "Q8_0", dry_run=True)
    assert [tensor.target.name for tensor in done.plan.tensors] == ["F32", "Q8_0", "Q8_0", "Q8_0"]
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_the_file_records_its_importance_matrix(tmp_path: Path) -> None:
    importance = write_importance(tmp_path / "imatrix.gguf", datasets=["talk.txt"], chunk_count=12)
    target = tmp_path / "small.gguf"
    done = edgeinfer.quantize(write_model(tmp_path / "m.gguf"), target, importance=importance)
    with GGUFFile.open(target) as file:
        recorded = {key: value for key, value in file.metadata.items() if key.startswith("quantize.")}
    assert recorded == {
        "quantize.imatrix.file": str(importance),
        "quantize.imatrix.dataset": "talk.txt",
        "quantize.imatrix.entries_count": 1,
        "quantize.imatrix.chunks_count": 12,
    }
    assert done.warnings == (
        "the importance matrix doesn't name 1 tensor (blk.0.ffn_down.weight): quantized without it",
    )


def test_a_file_that_has_the_type_already_is_reported(tmp_path: Path) -> None:
    source = write_model(tmp_path / "m.gguf", format="Q8_0")
    done = edgeinfer.quantize(source, tmp_path / "same.gguf", "Q8_0")
    assert done.warnings == ("every tensor has its type in Q8_0 already: the copy has the same weights",)


def test_warnings_report_fallbacks_missing_importance_and_requantization(tmp_path: Path) -> None:
    source = write_model(tmp_path / "m.gguf", columns=224, format="Q8_0")
    done = edgeinfer.quantize(source, None, "Q2_K_S", allow_requantize=True, dry_run=True)
    assert done.warnings == (
        "rows of 2 tensors don't fill Q2_K blocks: stored as Q4_0",
        "Q2_K_S is made for an importance matrix (imatrix=); expect a poor model",
        "2 tensors quantized already: the new error comes on top of the old one",
    )


@pytest.mark.parametrize("type", ["IQ1_S", "IQ2_M", "IQ3_XXS"])
def test_the_smallest_types_need_an_importance_matrix(type: str, tmp_path: Path) -> None:
    source, target = write_model(tmp_path / "m.gguf"), tmp_path / "small.gguf"
    needs = r"blk\.0\.attn_q\.weight: IQ\w+ needs an importance matrix that names it \(imatrix=\)"
    with pytest.raises(SettingError, match=rf"^{needs}; `edgeinfer profile MODEL --imatrix TEXT` makes one$"):
        edgeinfer.quantize(source, target, type)
    [warning] = edgeinfer.quantize(source, None, type, dry_run=True).warnings
    assert re.fullmatch(needs, warning)
    importance = write_importance(tmp_path / "imatrix.gguf")
    with pytest.raises(SettingError, match=r"blk\.0\.ffn_down\.weight: IQ2_XXS needs an importance matrix"):
        edgeinfer.quantize(source, target, "IQ2_XXS", importance=importance)
    edgeinfer.quantize(
        source, target, "Q4_0", overrides={"attn": type.replace("M", "S")}, importance=importance
    )
    assert formats_of(target)["blk.0.attn_q"] == type.replace("M", "S")


def test_embeddings_and_iq3_s_need_no_importance_matrix(tmp_path: Path) -> None:
    target = tmp_path / "small.gguf"
    edgeinfer.quantize(write_model(tmp_path / "m.gguf"), target, "IQ3_S", embedding_type="IQ2_XS")
    assert formats_of(target) == {
        "output_norm": "F32", "token_embd": "IQ2_XS", "blk.0.attn_q": "IQ3_S", "blk.0.ffn_down": "IQ3_S",
    }  # fmt: skip


class Refusal(NamedTuple):
    settings: dict[str, Any]
    message: str


REFUSALS = (
    Refusal({"threads": 0}, "threads: saw 0, wanted a whole number of at least 1"),
    Refusal({"output_type": "Q9"}, "output_type: format Q9 is unknown; supported: F32"),
    Refusal({"embedding_type": "I8"}, "embedding_type: format I8 is not for weights"),
    Refusal({"overrides": {"a(": "Q8_0"}}, r"pattern 'a\(': missing \), .* wanted a regular expression"),
    Refusal({"overrides": {"a": "Q9"}}, "pattern 'a': format Q9 is unknown"),
    Refusal(
        {"overrides": {"norm": "Q8_0"}}, "pattern 'norm': matches none of the tensors that are quantized"
    ),
)


@pytest.mark.parametrize("refusal", REFUSALS)
def test_invalid_options_are_refused(refusal: Refusal, tmp_path: Path) -> None:
    source = write_model(tmp_path / "m.gguf")
    with pytest.raises(SettingError, match=refusal.message):
        edgeinfer.quantize(source, tmp_path / "small.gguf", **refusal.settings)
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_quantized_tensors_are_quantized_again_only_if_allowed(tmp_path: Path) -> None:
    source, target = write_model(tmp_path / "m.gguf", format="Q8_0"), tmp_path / "small.gguf"
    expected = r"3 of 4 tensors are quantized already \(token_embd.weight is Q8_0\).*allow_requantize=True"
    with pytest.raises(SettingError, match=expected):
        edgeinfer.quantize(source, target)
    edgeinfer.quantize(source, target, allow_requantize=True)
    assert formats_of(target)["blk.0.attn_q"] == "Q4_K"


def test_the_model_to_read_is_never_written_over(tmp_path: Path) -> None:
    source = write_model(tmp_path / "m.gguf")
    before = source.read_bytes()
    (tmp_path / "link.gguf").symlink_to(source)
    for target in (source, tmp_path / "link.gguf"):
        with pytest.raises(SettingError, match="is the model to read, wanted another file to write"):
            edgeinfer.quantize(source, target, overwrite=True)
    assert source.read_bytes() == before


def test_an_older_file_is_replaced_only_if_allowed(tmp_path: Path) -> None:
    source, target = write_model(tmp_path / "m.gguf"), tmp_path / "old.gguf"
    target.write_bytes(b"old")
    with pytest.raises(SettingError, match=r"old\.gguf: is there already; replace it with overwrite=True"):
        edgeinfer.quantize(source, target)
    assert target.read_bytes() == b"old"
    edgeinfer.quantize(source, target, overwrite=True)
    assert formats_of(target)["token_embd"] == "Q6_K"


def test_a_target_that_cannot_be_a_file_is_refused(tmp_path: Path) -> None:
    source = write_model(tmp_path / "m.gguf")
    with pytest.raises(SettingError, match="is a folder, wanted the path of a file to write"):
        edgeinfer.quantize(source, tmp_path)
    with pytest.raises(SettingError, match="there is no such folder"):
        edgeinfer.quantize(source, tmp_path / "nowhere" / "small.gguf")
    with pytest.raises(SettingError, match="target: saw None"):
        edgeinfer.quantize(source, None)
    with pytest.raises(UnknownModelError, match="no such file"):
        edgeinfer.quantize(tmp_path / "n.gguf", tmp_path / "small.gguf")


def test_a_full_disk_is_reported_before_quantizing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(total=100, used=90, free=10))
    with pytest.raises(SettingError, match=r"takes [0-9]+ bytes, wanted at most 10, which are free there"):
        edgeinfer.quantize(write_model(tmp_path / "m.gguf"), tmp_path / "small.gguf")


def test_a_disk_that_fills_up_is_reported_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    source, target = write_model(tmp_path / "m.gguf"), tmp_path / "small.gguf"
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match="No space left on device") as caught:
        edgeinfer.quantize(source, target)
    assert caught.value.filename == str(target)
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]
