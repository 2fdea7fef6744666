"""Adapters of PEFT on folders and converted files give the logits of PEFT."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import edgeinfer
from edgeinfer import Model
from edgeinfer.errors import SettingError
from tests.conftest import needs
from tests.edgeinfer.distances import distance
from tests.edgeinfer.hugging_face.random_folders import Logits, logits_of, random_model, write_folder

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.numpy")

pytestmark = needs("transformers")
IDS = np.random.default_rng(5).integers(3, 280, 30).tolist()
LLAMA = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
TARGETS = {
    "llama": [*LLAMA, "embed_tokens", "lm_head"],
    "qwen3": LLAMA,
    "gemma2": LLAMA,
    "phi3": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "gptneox": ["query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"],
    "gpt2": ["c_attn", "c_proj", "c_fc"],
    "mamba": ["in_proj", "x_proj"],
    "olmo2": LLAMA,
}


def adapted(name: str, folder: Path, **options: Any) -> tuple[Path, Path, Logits]:
    """The folders of a model and of a random adapter, and the logits of PEFT with it."""
    peft = pytest.importorskip("peft")
    model = random_model(name)
    base = write_folder(model, folder / "base")
    settings = {"r": 4, "lora_alpha": 12, "target_modules": TARGETS[name], **options}
    changed = peft.get_peft_model(model, peft.LoraConfig(**settings))
    random = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter, values in changed.named_parameters():
            if "lora_" in parameter:
                values.copy_(0.1 * torch.randn(values.shape, generator=random))
    changed.save_pretrained(folder / "adapter", save_embedding_layers=False)
    return base, folder / "adapter", logits_of(changed.eval(), IDS)


def loaded(path: Path, **options: Any) -> Model:
    return edgeinfer.load(path, device="cpu", kv="f32", draft=None, threads=1, context=64, **options)


@pytest.mark.default_cases(2)
@pytest.mark.parametrize("name", TARGETS)
def test_an_adapter_of_peft_gives_its_logits(tmp_path: Path, name: str) -> None:
    base, adapter, expected = adapted(name, tmp_path)
    with loaded(base, lora=adapter) as model:
        assert distance(model.logits(IDS), expected) < (1e-3 if name == "mamba" else 1e-5)
        model.set_lora(None)
        assert distance(model.logits(IDS), expected) > 0.01


def test_rslora_and_patterns_of_rank_and_alpha_are_those_of_peft(tmp_path: Path) -> None:
    base, adapter, expected = adapted(
        "qwen3",
        tmp_path,
        use_rslora=True,
        rank_pattern={"q_proj": 8},
        alpha_pattern={"layers.1.mlp.up_proj": 3},
    )
    edgeinfer.convert(base, tmp_path / "model.gguf")
    with loaded(tmp_path / "model.gguf", lora=adapter) as model:
        assert distance(model.logits(IDS), expected) < 1e-5


def test_adapters_of_single_experts_are_stacked(tmp_path: Path) -> None:
    base = write_folder(random_model("qwen3moe"), tmp_path / "base")
    random = np.random.default_rng(1)
    tensors: dict[str, npt.NDArray[np.float32]] = {}
    dense: dict[str, npt.NDArray[np.float32]] = {}
    for expert, part, (rows, columns) in (
        (1, "up_proj", (32, 64)),
        (3, "up_proj", (32, 64)),
        (0, "down_proj", (64, 32)),
    ):
        a, b = random.standard_normal((2, columns)), random.standard_normal((rows, 2)) * 0.3
        module = f"model.layers.0.mlp.experts.{expert}.{part}"
        dense[module] = (b @ a).astype(np.float32)
        tensors[f"base_model.model.{module}.lora_A.weight"] = a.astype(np.float32)
        tensors[f"base_model.model.{module}.lora_B.weight"] = b.astype(np.float32)
    adapter = write_adapter(tmp_path / "adapter", tensors, r=2, lora_alpha=2)
    merged = tmp_path / "merged"
    merged.mkdir()
    for file in base.iterdir():
        (merged / file.name).write_bytes(file.read_bytes())
    weights = safetensors.load_file(base / "model.safetensors")
    for module, values in dense.items():
        weights[f"{module}.weight"] = weights[f"{module}.weight"] + values
    safetensors.save_file(weights, merged / "model.safetensors", {"format": "pt"})
    with loaded(merged) as model:
        expected = model.logits(IDS)
    with loaded(base, lora=adapter) as model:
        assert distance(model.logits(IDS), expected) < 1e-5


def write_adapter(folder: Path, tensors: dict[str, Any], **config: Any) -> Path:
    folder.mkdir()
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "bias": "none", **config}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    safetensors.save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def pair(module: str, rank: int = 4, rows: int = 64) -> dict[str, npt.NDArray[np.float32]]:
    return {
        f"base_model.model.{module}.lora_A.weight": np.zeros((rank, 64), np.float32),
        f"base_model.model.{module}.lora_B.weight": np.zeros((rows, rank), np.float32),
    }


Q = "model.layers.0.self_attn.q_proj"
Case = tuple[dict[str, Any], dict[str, Any], str]
REFUSED: dict[str, Case] = {
    "kind": ({"peft_type": "IA3"}, pair(Q), "adapter_config.json: peft_type 'IA3', wanted 'LORA'"),
    "dora": ({"use_dora": True}, pair(Q), "use_dora True, wanted none: DoRA aren't LoRA"),
    "bias": ({"bias": "all"}, pair(Q), "bias 'all', wanted 'none'"),
    "lora bias": ({"lora_bias": True}, pair(Q), "lora_bias True, wanted none: biases of lora_B"),
    "whole": ({"modules_to_save": ["lm_head"]}, pair(Q), "modules_to_save ['lm_head'], wanted none"),
    "pissa": (
        {"init_lora_weights": "pissa"},
        pair(Q),
        "init_lora_weights 'pissa' changes the model's weights",
    ),
    "alpha": ({"lora_alpha": "x"}, pair(Q), "lora_alpha 'x', wanted a finite number"),
    "rank": ({"r": 3}, pair(Q), f"tensor {Q}: rank 4, wanted 3 as adapter_config.json"),
    "module": ({}, pair("model.layers.0.mlp.router\x1b"), "mlp.router?: llama has no such module in GGUF"),
    "layer": ({}, pair("model.layers.9.self_attn.q_proj"), "blk.9.attn_q.weight: the model has 4 layers"),
    "half": ({}, dict(list(pair(Q).items())[:1]), f"tensor {Q}: one of lora_A and lora_B is missing"),
    "magnitude": (
        {},
        {f"{Q}.lora_magnitude_vector": np.zeros(4, np.float32)},
        "wanted lora_A and lora_B only",
    ),
    "integers": ({}, {k: v.astype(np.int32) for k, v in pair(Q).items()}, "type I32, wanted floats"),
    "rows": ({}, pair(Q, rows=60), "blk.0.attn_q.weight: 60 rows don't fit the heads"),
    "empty": ({}, {}, "no tensors, wanted pairs of lora_A and lora_B"),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = write_folder(random_model("llama"), tmp_path_factory.mktemp("llama"))
    with loaded(folder) as opened:
        yield opened


@pytest.mark.parametrize("name", REFUSED)
def test_other_adapters_are_refused_by_name(model: Model, tmp_path: Path, name: str) -> None:
    config, tensors, message = REFUSED[name]
    folder = write_adapter(tmp_path / "adapter", tensors, **config)
    with pytest.raises(SettingError) as caught:
        model.set_lora(folder)
    assert message in str(caught.value)
    assert str(caught.value).startswith(str(folder))
    assert str(caught.value).isprintable()


Damage = Callable[[Path], object]
DAMAGED: dict[str, tuple[Damage, str]] = {
    "no weights": (lambda folder: (folder / "adapter_model.safetensors").unlink(), "No such file"),
    "no JSON": (
        lambda folder: (folder / "adapter_config.json").write_text("{"),
        "Expecting property",
    ),
    "cut": (
        lambda folder: (folder / "adapter_model.safetensors").write_bytes(b"12345678{}"),
        "a header of",
    ),
    "no config": (
        lambda folder: (folder / "adapter_config.json").unlink(),
        "a folder without adapter_config.json",
    ),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_adapters_are_reported_in_one_line(model: Model, tmp_path: Path, name: str) -> None:
    folder = write_adapter(tmp_path / "adapter", pair(Q))
    damage, message = DAMAGED[name]
    damage(folder)
    with pytest.raises(SettingError) as caught:
        model.set_lora(folder)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)
