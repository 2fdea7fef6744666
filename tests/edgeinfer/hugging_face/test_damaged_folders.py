"""Incomplete and damaged folders end in one line that names the file or the setting."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer.errors import EdgeInferError, UnknownModelError
from edgeinfer_quant_formats.errors import FormatError
from edgeinfer_quant_formats.safetensors.reader import SafetensorsFile
from edgeinfer_quant_formats.safetensors.sharded import INDEX, SINGLE
from tests.conftest import needs
from tests.edgeinfer.hugging_face.random_folders import random_model, write_folder

pytest.importorskip("torch")

pytestmark = needs("transformers")
Change = Callable[[Path], None]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(random_model("llama"), tmp_path_factory.mktemp("whole"))


def _config(**changes: Any) -> Change:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def _write(name: str, text: str | bytes) -> Change:
    data = text if isinstance(text, bytes) else text.encode()

    def change(folder: Path) -> None:
        (folder / name).write_bytes(data)

    return change


def _header(text: str, more: bytes = b"") -> bytes:
    return len(text).to_bytes(8, "little") + text.encode() + more


def _index(weight_map: Any) -> Change:
    return _write(INDEX, json.dumps({"weight_map": weight_map}))


TENSOR = '{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}'
DAMAGE: dict[str, tuple[Change, str]] = {
    "no tokenizer": (lambda folder: (folder / "tokenizer.json").unlink(), "tokenizer.json is missing"),
    "no JSON": (_write("config.json", "{"), "config.json: Expecting property name"),
    "a list": (_write("config.json", "[]"), "config.json: saw list, wanted a JSON object"),
    "architecture": (_config(architectures=["A\x1b[31mB"]), "architecture 'A\\x1b[31mB' isn't one of the"),
    "no architecture": (_config(architectures=None), "architecture None isn't one of the"),
    "activation": (_config(hidden_act="tanh"), "hidden_act 'tanh', wanted silu or swish"),
    "heads": (_config(num_attention_heads=0), "tensor blk.0.attn_q.bias: shape (64,) doesn't fit the config"),
    "odd heads": (_config(num_attention_heads=5), "tensor blk.0.attn_q.bias: shape (64,) doesn't fit"),
    "layers": (_config(num_hidden_layers="4"), "num_hidden_layers '4', wanted a positive whole number"),
    "no width": (_config(hidden_size=None), "no hidden_size, wanted one"),
    "rope": (
        _config(rope_parameters={"rope_type": "dynamic"}),
        "rope_type 'dynamic', wanted default, linear",
    ),
    "epsilon": (_config(rms_norm_eps="x"), "rms_norm_eps 'x', wanted a finite number"),
    "window": (
        _config(architectures=["SeedOssForCausalLM"], sliding_window=8),
        "sliding_window 8, wanted none",
    ),
    "unknown tensor": (_config(architectures=["Phi3ForCausalLM"]), "phi3 has no such tensor"),
    "cut file": (lambda folder: os.truncate(folder / SINGLE, 5000), "wanted at most"),
    "empty file": (_write(SINGLE, b""), "the file has 0 bytes, wanted a safetensors file of at least 10"),
    "long header": (_write(SINGLE, (1 << 60).to_bytes(8, "little") + b"{}"), f"a header of {1 << 60} bytes"),
    "header": (_write(SINGLE, _header("{{}}")), "header: Expecting property name"),
    "twice": (_write(SINGLE, _header('{"a":1,"a":2}')), "header: a name occurs twice, wanted JSON"),
    "entry": (
        _write(SINGLE, _header('{"a":{"dtype":"F32"}}')),
        "tensor a: wanted dtype, shape and data_offsets",
    ),
    "dtype": (_write(SINGLE, _header(TENSOR.replace("F32", "F3"))), "tensor a: dtype F3, wanted one of F64"),
    "shape": (
        _write(SINGLE, _header(TENSOR.replace("[2]", "[-2]"))),
        "tensor a: shape [-2], wanted at most 8",
    ),
    "offsets": (_write(SINGLE, _header(TENSOR.replace("0,8", "0,9"))), "data_offsets [0, 9], wanted 8 bytes"),
    "end": (_write(SINGLE, _header(TENSOR)), "tensor a: ends at byte"),
    "gap": (_write(SINGLE, _header(TENSOR, bytes(9))), "the tensors end at byte"),
    "a missing file": (_index({"a": "other.safetensors"}), "other.safetensors is missing, wanted all"),
    "outside": (_index({"a": "../x.safetensors"}), "file ../x.safetensors, wanted a .safetensors file there"),
    "no map": (_write(INDEX, "{}"), "wanted a JSON object with a weight_map"),
    "an empty map": (_index({}), "its weight_map is empty, wanted tensors"),
    "not there": (_index({"lost": SINGLE}), f"tensor lost is missing, which {INDEX} lists there"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_folder_is_reported_in_one_line(whole: Path, tmp_path: Path, name: str) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    for file in whole.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    change, message = DAMAGE[name]
    change(folder)
    with pytest.raises((EdgeInferError, FormatError)) as caught:
        edgeinfer.load(folder, device="cpu", threads=1)
    text = str(caught.value)
    assert message in text
    assert text.isprintable()


def test_a_folder_without_weights_is_no_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UnknownModelError, match=r"without a \.gguf file, or config\.json and safetensors"):
        edgeinfer.load(tmp_path)


def test_an_empty_safetensors_file_has_no_tensors(tmp_path: Path) -> None:
    path = tmp_path / "a.safetensors"
    path.write_bytes(_header('{"__metadata__":{"format":"pt"}}'))
    with SafetensorsFile(path) as file:
        assert (file.tensors, file.metadata) == ({}, {"format": "pt"})
        with pytest.raises(FormatError, match="no tensor a"):
            file.array("a")
