"""Random LoRA adapters of GGUF models, and the models with adapters merged into F32 weights."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeinfer_quant_formats import GGUFFile, GGUFWriter

Floats = npt.NDArray[np.float32]
MATRICES = ("attn_", "ffn_", "output.weight", "ssm_in", "ssm_out")
"""Parts of names of the tensors that a random adapter changes."""
ALPHA = 16.0


def adapter_tensors(
    model: Path, rank: int = 8, names: Sequence[str] = MATRICES, seed: int = 0
) -> dict[str, Floats]:
    """The tensors of a random adapter of a model, by name."""
    random = np.random.default_rng(seed)
    tensors: dict[str, Floats] = {}
    with GGUFFile.open(model) as file:
        for name, info in file.tensors.items():
            if len(info.shape) < 2 or not name.endswith(".weight") or not any(p in name for p in names):
                continue
            *experts, rows, columns = info.shape
            a = random.standard_normal((*experts, rank, columns), np.float32) / np.float32(columns**0.5)
            b = random.standard_normal((*experts, rows, rank), np.float32) * np.float32(0.3)
            if name == "token_embd.weight":
                a = random.standard_normal((rows, rank), np.float32) / 4
                b = random.standard_normal((columns, rank), np.float32) / 4
            tensors[f"{name}.lora_a"], tensors[f"{name}.lora_b"] = a, b
    return tensors


def adapter_metadata(model: Path, alpha: float | None = ALPHA) -> dict[str, Any]:
    """The metadata of an adapter of a model."""
    with GGUFFile.open(model) as file:
        architecture = file.metadata["general.architecture"]
    scale = {} if alpha is None else {"adapter.lora.alpha": np.float32(alpha)}
    return {
        "general.type": "adapter",
        "general.architecture": architecture,
        "adapter.type": "lora",
        **scale,
    }


def write_adapter(
    model: Path,
    path: Path,
    *,
    rank: int = 8,
    names: Sequence[str] = MATRICES,
    seed: int = 0,
    alpha: float | None = ALPHA,
    format: str = "F32",
) -> Path:
    """Write a random adapter of a model."""
    with GGUFWriter(path, adapter_metadata(model, alpha)) as writer:
        for name, values in adapter_tensors(model, rank, names, seed).items():
            writer.add_tensor(name, values, format)
    return path


def merged(model: Path, adapters: Mapping[Path, float], path: Path) -> Path:
    """The model with F32 weights, to which the adapters times their scales are added."""
    with GGUFFile.open(model) as file, GGUFWriter(path, file.metadata) as writer:
        for name in file.tensors:
            values = file.decode(name)
            for adapter, scale in adapters.items():
                values = values + np.float32(scale) * delta(adapter, name)
            writer.add_tensor(name, np.asarray(values, np.float32), "F32")
    return path


def delta(adapter: Path, name: str) -> Floats | float:
    """What an adapter adds to a tensor."""
    with GGUFFile.open(adapter) as file:
        if f"{name}.lora_a" not in file.tensors:
            return 0.0
        a, b = file.decode(f"{name}.lora_a"), file.decode(f"{name}.lora_b")
        alpha = file.metadata.get("adapter.lora.alpha", 0.0)
        factor = np.float32(alpha / b.shape[-1] if alpha else 1.0)
        return factor * (a @ b.T if name == "token_embd.weight" else np.matmul(b, a))
