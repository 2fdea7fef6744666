"""Files in PowerInfer's dialect give the logits of ordinary files, and their predictors select neurons."""

from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import pytest

import edgeinfer
from edgeinfer.errors import EdgeInferError
from edgeinfer.hugging_face.opening import open_file
from edgeinfer.hugging_face.powerinfer_file import PowerInferFile
from edgeinfer_quant_formats import GGUFFile, GGUFWriter
from tests.model_zoo import ZOO

LLAMA = replace(ZOO["llama"], width=256, feed_forward=512, layers=3)
IDS = list(range(20, 32))
RANK = 40
Floats = npt.NDArray[np.float32]


def write(
    target: Path, source: Path, kind: str, predictors: list[tuple[Floats, Floats]], threshold: float = 0.0
) -> None:
    """The model of an ordinary file in PowerInfer's dialect, with down in the format `kind`."""
    with GGUFFile.open(source) as file, GGUFWriter(target, file.metadata) as writer:
        writer.add_metadata("powerinfer.sparse_threshold", threshold)
        for name, info in file.tensors.items():
            if ".ffn_down." in name:
                down = np.ascontiguousarray(file.decode(name).T)
                writer.add_tensor(name.replace("ffn_down", "ffn_down_t"), down, kind)
            else:
                writer.add_tensor(name, file.raw(name).copy(), info.format, info.shape)
        for layer, (first, second) in enumerate(predictors):
            writer.add_tensor(f"blk.{layer}.fc1.weight", first, "F32")
            writer.add_tensor(f"blk.{layer}.fc2.weight", second, "F32")
    content = target.read_bytes()
    target.write_bytes(b"PWRI" + content[4:])


def with_relu(source: Path, target: Path) -> Path:
    """An ordinary file of the model that names its ReLU."""
    with GGUFFile.open(source) as file, GGUFWriter(target, file.metadata) as writer:
        writer.add_metadata("llama.hidden_activation", "relu")
        for name, info in file.tensors.items():
            writer.add_tensor(name, file.raw(name).copy(), info.format, info.shape)
    return target


def true_predictors(path: Path) -> list[tuple[Floats, Floats]]:
    """Predictors whose scores are those of gate before the norm's scale: relu(g·w·x) - relu(-g·w·x)."""
    made = []
    with GGUFFile.open(path) as file:
        for layer in range(3):
            gate = file.decode(f"blk.{layer}.ffn_gate.weight") * file.decode(f"blk.{layer}.ffn_norm.weight")
            identity = np.eye(len(gate), dtype=np.float32)
            made.append((np.vstack([gate, -gate]), np.hstack([identity, -identity])))
    return made


@pytest.fixture
def plain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    return replace(LLAMA, formats=("Q8_0",)).write(tmp_path / "plain.gguf")


def logits(path: Path, sparse: Literal["off", "predicted"] = "off") -> Floats:
    with edgeinfer.load(path, device="cpu", threads=2, context=64, sparse=sparse, draft=None) as model:
        return np.stack([model.engine.append([token]) for token in IDS])


def random_predictors(seed: int = 3) -> list[tuple[Floats, Floats]]:
    random = np.random.default_rng(seed)
    return [
        (
            random.standard_normal((RANK, 256)).astype(np.float32),
            random.standard_normal((512, RANK)).astype(np.float32),
        )
        for _ in range(3)
    ]


@pytest.mark.parametrize("kind", ["F32", "F16"])
def test_a_transposed_down_gives_the_logits_of_the_ordinary_file(
    plain: Path, tmp_path: Path, kind: str
) -> None:
    exact = tmp_path / "exact.gguf"
    with GGUFFile.open(plain) as file, GGUFWriter(exact, file.metadata) as writer:
        writer.add_metadata("llama.hidden_activation", "relu")
        for name, info in file.tensors.items():
            if ".ffn_down." in name:
                writer.add_tensor(name, file.decode(name), kind)
            else:
                writer.add_tensor(name, file.raw(name).copy(), info.format, info.shape)
    dialect = tmp_path / "model.powerinfer.gguf"
    write(dialect, plain, kind, random_predictors())
    assert np.array_equal(logits(dialect), logits(exact))


def test_a_quantized_down_is_stored_again_in_eight_bits(plain: Path, tmp_path: Path) -> None:
    dialect = tmp_path / "model.powerinfer.gguf"
    write(dialect, plain, "Q4_0", random_predictors())
    with open_file(dialect) as file, GGUFFile.open(dialect) as stored:
        assert isinstance(file, PowerInferFile)
        info = file.tensors["blk.1.ffn_down.weight"]
        assert (info.shape, info.format.name) == ((256, 512), "Q8_0")
        right = stored.decode("blk.1.ffn_down_t.weight").T
        np.testing.assert_allclose(
            file.decode("blk.1.ffn_down.weight"), right, rtol=0, atol=0.005 * np.abs(right).max()
        )
        assert not any("fc1" in name for name in file.tensors)
    assert np.isfinite(logits(dialect)).all()


def test_predictors_that_know_the_gate_give_the_dense_logits(plain: Path, tmp_path: Path) -> None:
    dialect = tmp_path / "model.powerinfer.gguf"
    write(dialect, plain, "Q8_0", true_predictors(plain))
    dense, predicted = logits(dialect), logits(dialect, "predicted")
    assert np.abs(predicted - dense).max() < 0.02 * np.abs(dense).max()
    with edgeinfer.load(dialect, device="cpu", threads=2, sparse="predicted", draft=None) as model:
        assert any("by the predictors of the file" in detail for detail in model.details)


@pytest.mark.slow
def test_a_quantized_file_stays_in_the_dialect_with_its_predictors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    source = replace(LLAMA, formats=("F16",)).write(tmp_path / "source.gguf")
    dialect, small = tmp_path / "model.powerinfer.gguf", tmp_path / "small.gguf"
    write(dialect, source, "F16", true_predictors(source))
    with pytest.raises(EdgeInferError, match=r"ffn_gate\.weight is F16"):
        logits(dialect, "predicted")
    edgeinfer.quantize(dialect, small, "Q8_0")
    dense = logits(small)
    assert np.abs(logits(small, "predicted") - dense).max() < 0.05 * np.abs(dense).max()


@pytest.mark.slow
def test_a_threshold_above_all_scores_leaves_out_all_neurons(plain: Path, tmp_path: Path) -> None:
    paths = []
    for threshold in (0.0, 1e9):
        paths.append(tmp_path / f"{threshold}.powerinfer.gguf")
        write(paths[-1], plain, "Q8_0", true_predictors(plain), threshold)
    some, none = (logits(path, "predicted") for path in paths)
    without = tmp_path / "without.gguf"
    with GGUFFile.open(plain) as file, GGUFWriter(without, file.metadata) as writer:
        for name, info in file.tensors.items():
            raw = np.zeros_like(file.raw(name)) if "ffn_down" in name else file.raw(name).copy()
            writer.add_tensor(name, raw, info.format, info.shape)
    np.testing.assert_allclose(none, logits(without), rtol=0, atol=1e-5 * np.abs(none).max())
    assert np.abs(some - none).max() > 0.05 * np.abs(none).max()


def test_predictors_of_a_wrong_shape_are_refused(plain: Path, tmp_path: Path) -> None:
    dialect = tmp_path / "model.powerinfer.gguf"
    write(dialect, plain, "Q8_0", [(first[:, :128], second) for first, second in random_predictors()])
    assert np.isfinite(logits(dialect)).all()
    with pytest.raises(EdgeInferError, match=r"blk.0.fc1.weight, fc2.weight: shapes \(40, 128\)"):
        logits(dialect, "predicted")


def test_bamboo_is_a_llama_with_two_rectified_projections(plain: Path, tmp_path: Path) -> None:
    dialect, ordinary = tmp_path / "bamboo.gguf", tmp_path / "drelu.gguf"
    with GGUFFile.open(plain) as file:
        keys = {key: value for key, value in file.metadata.items() if key != "general.architecture"}
        renamed = {key.replace("llama.", "bamboo.", 1): value for key, value in keys.items()}
        with GGUFWriter(dialect, {"general.architecture": "bamboo", **renamed}) as writer:
            for name, info in file.tensors.items():
                if ".ffn_down." in name:
                    down = np.ascontiguousarray(file.decode(name).T)
                    writer.add_tensor(name.replace("ffn_down", "ffn_down_t"), down, "F32")
                else:
                    writer.add_tensor(name, file.raw(name).copy(), info.format, info.shape)
        named = {"general.architecture": "llama", **keys, "llama.hidden_activation": "drelu"}
        with GGUFWriter(ordinary, named) as writer:
            for name, info in file.tensors.items():
                source = file.decode(name) if ".ffn_down." in name else file.raw(name).copy()
                writer.add_tensor(name, source, "F32" if ".ffn_down." in name else info.format, info.shape)
    assert np.array_equal(logits(dialect), logits(ordinary))
