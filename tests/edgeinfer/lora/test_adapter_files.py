"""Adapters that can't be used end in one line that names the file, what was seen and what is wanted."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer import Model
from edgeinfer.errors import EdgeInferError, SettingError
from edgeinfer.model_config.support import support_of
from edgeinfer.options.lora_option import LoraChoice, lora_choices
from edgeinfer_quant_formats import GGUFWriter
from tests.edgeinfer.conftest import ZooFile
from tests.edgeinfer.lora.random_adapters import adapter_metadata, adapter_tensors, write_adapter
from tests.kernels.system.marks import NEEDS_ANY_NAME

Change = Callable[[dict[str, Any], dict[str, Any]], None]


@pytest.mark.parametrize(
    ("given", "choices"),
    [
        (None, []),
        ("a.gguf", [("a.gguf", 1.0)]),
        ("a.gguf:0.5", [("a.gguf", 0.5)]),
        ("C:\\a.gguf", [("C:\\a.gguf", 1.0)]),
        (("a.gguf", -2), [("a.gguf", -2.0)]),
        (["a.gguf:0", Path("b"), ("c", 0.25)], [("a.gguf", 0.0), ("b", 1.0), ("c", 0.25)]),
    ],
)
def test_adapters_are_named_by_path_and_scale(given: Any, choices: list[tuple[str, float]]) -> None:
    assert lora_choices("lora", given) == tuple(LoraChoice(Path(path), scale) for path, scale in choices)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (5, "lora: saw 5, wanted an adapter's path"),
        ([5], "lora: saw 5, wanted an adapter's path"),
        ("", "lora: saw '', wanted"),
        ("a.gguf:nan", "lora: saw the scale nan, wanted a finite number"),
        (("a", True), "lora: saw the scale True, wanted a finite number"),
        (["a", "a:2"], "lora: saw 'a' twice, wanted each adapter once"),
    ],
)
def test_other_values_are_refused(given: Any, message: str) -> None:
    with pytest.raises(SettingError) as caught:
        lora_choices("lora", given)
    assert str(caught.value).startswith(message)


@NEEDS_ANY_NAME
def test_a_colon_in_the_name_of_an_existing_file_is_no_scale(tmp_path: Path) -> None:
    path = tmp_path / "a:2"
    path.touch()
    assert lora_choices("lora", str(path)) == (LoraChoice(path),)


def _set(key: str, value: Any) -> Change:
    return lambda metadata, tensors: metadata.__setitem__(key, value)


def _tensor(name: str, shape: tuple[int, ...], fill: float = 0.0) -> Change:
    return lambda metadata, tensors: tensors.__setitem__(name, np.full(shape, fill, np.float32))


def _without(name: str) -> Change:
    return lambda metadata, tensors: tensors.__delitem__(name)


Q = "blk.0.attn_q.weight"
DAMAGE: list[tuple[Change, str]] = [
    (_set("general.type", "model"), "general.type: saw 'model', wanted 'adapter': it is no LoRA adapter"),
    (_set("adapter.type", "ia3"), "adapter.type: saw 'ia3', wanted 'lora'"),
    (_set("general.architecture", "phi3"), "it is for models of 'phi3', wanted one for 'llama'"),
    (_set("adapter.lora.alpha", "16"), "adapter.lora.alpha: saw '16', wanted a finite number"),
    (_set("adapter.lora.alpha", float("nan")), "adapter.lora.alpha: saw nan, wanted a finite number"),
    (
        _set("adapter.alora.invocation_tokens", np.array([1], np.uint32)),
        "it is an activated LoRA (adapter.alora.invocation_tokens), wanted a plain one",
    ),
    (_tensor("blk.0.attn_norm.weight", (64,)), "wanted names that end in .lora_a or .lora_b only"),
    (_without(f"{Q}.lora_b"), f"tensor {Q}.lora_b is missing, wanted both of a pair"),
    (_tensor(f"{Q}.lora_a", (8, 60)), f"{Q}: it is for shape (64, 60), the model has (64, 64)"),
    (_tensor(f"{Q}.lora_a", (4, 64)), f"{Q}: lora_a (4, 64) has rank 4, lora_b (64, 8) has 8"),
    (_tensor(f"{Q}.lora_a", (2, 8, 64)), f"{Q}: lora_a (2, 8, 64) and lora_b (64, 8), wanted two matrices"),
    (_tensor(f"{Q}.lora_a", (8, 64), np.nan), f"{Q}: a value is NaN or infinite, wanted finite numbers"),
    (lambda metadata, tensors: tensors.clear(), "it has no tensors, wanted pairs of lora_a and lora_b"),
]


@pytest.mark.parametrize(("change", "message"), DAMAGE)
def test_a_malformed_adapter_is_named_in_one_line(
    loaded: Model, zoo_file: ZooFile, tmp_path: Path, change: Change, message: str
) -> None:
    model, path = zoo_file("llama"), tmp_path / "a.gguf"
    metadata, tensors = adapter_metadata(model), adapter_tensors(model)
    change(metadata, tensors)
    with GGUFWriter(path, metadata) as writer:
        for name, values in tensors.items():
            writer.add_tensor(name, values, "F32")
    with pytest.raises(SettingError) as caught:
        loaded.set_lora(path)
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)
    assert loaded.lora == ()


def test_names_with_control_characters_are_shown_without_them(
    loaded: Model, zoo_file: ZooFile, tmp_path: Path
) -> None:
    path = tmp_path / "a.gguf"
    with GGUFWriter(path, adapter_metadata(zoo_file("llama"))) as writer:
        for suffix in ("lora_a", "lora_b"):
            writer.add_tensor(f"blk.0\x1b[31m\n.{suffix}", np.zeros((8, 8), np.float32), "F32")
    with pytest.raises(SettingError) as caught:
        loaded.set_lora(path)
    assert "blk.0?[31m?: the model has no such tensor" in str(caught.value)


def test_truncated_adapters_are_refused(loaded: Model, zoo_file: ZooFile, tmp_path: Path) -> None:
    path = write_adapter(zoo_file("llama"), tmp_path / "a.gguf")
    size = path.stat().st_size
    for part in (0, 10, 100, 2000, size // 2, size - 1):
        cut = tmp_path / f"{part}.gguf"
        shutil.copy(path, cut)
        os.truncate(cut, part)
        with pytest.raises(SettingError) as caught:
            loaded.set_lora(cut)
        assert "\n" not in str(caught.value)


def test_a_missing_adapter_and_a_tensor_that_is_not_multiplied_are_named(
    loaded: Model, zoo_file: ZooFile, tmp_path: Path
) -> None:
    with pytest.raises(SettingError, match=r"nothing\.gguf: No such file or directory; wanted a LoRA"):
        loaded.set_lora(tmp_path / "nothing.gguf")
    path = zoo_file("deepseek2")
    adapter = write_adapter(path, tmp_path / "a.gguf", names=("attn_k_b",))
    with pytest.raises(SettingError, match=r"blk\.0\.attn_k_b\.weight"):
        edgeinfer.load(path, device="cpu", lora=adapter)


def test_a_closed_model_takes_no_adapters(zoo_file: ZooFile, tmp_path: Path) -> None:
    adapter = write_adapter(zoo_file("llama"), tmp_path / "a.gguf")
    model = edgeinfer.load(zoo_file("llama"), device="cpu", threads=1)
    model.close()
    with pytest.raises(EdgeInferError, match="has been closed; load it again"):
        model.set_lora(adapter)


def test_an_adapter_is_no_model(zoo_file: ZooFile, tmp_path: Path) -> None:
    adapter = write_adapter(zoo_file("llama"), tmp_path / "a.gguf")
    with pytest.raises(EdgeInferError, match=r"a\.gguf: a LoRA adapter, wanted a model; add it to one with"):
        edgeinfer.load(adapter)
    assert str(support_of(adapter)) == "nothing: it is a LoRA adapter, for --lora"
