"""Files of draft heads: a model's file split as llama.cpp's converters do with `--mtp` and `--no-mtp`,
and the tensors of random heads.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edgeinfer_quant_formats import GGUFFile, GGUFWriter
from tests.random_models import VOCABULARY, random_blocks

SHARED = ("token_embd.", "output.", "output_norm.", "rope_freqs.")


def split_heads(path: Path, model: Path, heads: Path) -> tuple[Path, Path]:
    """Write the layers of a model, and its draft heads with a copy of what they share with it."""
    with GGUFFile.open(path) as file:
        key = f"{file.metadata['general.architecture']}."
        count = file.metadata[key + "nextn_predict_layers"]
        layers = file.metadata[key + "block_count"] - count
        own = tuple(f"blk.{layer}." for layer in range(layers, layers + count))
        without = {
            name: value[:layers] if isinstance(value, np.ndarray) and len(value) == layers + count else value
            for name, value in file.metadata.items()
            if name.startswith(key)
        }
        without |= {key + "nextn_predict_layers": 0, key + "block_count": layers}
        _copy(file, model, without, [name for name in file.tensors if not name.startswith(own)])
        _copy(file, heads, {}, [name for name in file.tensors if name.startswith((*own, *SHARED))])
    return model, heads


def with_output(source: Path, path: Path, output: np.ndarray | None, ids: Any, kind: str = "Q8_0") -> Path:
    """Write a head of one layer with matrices of type `kind`, this output and its ids; None: without."""
    with GGUFFile.open(source) as file, GGUFWriter(path, file.metadata) as writer:
        for name, info in file.tensors.items():
            if name == "d2t" or "shared_head_head" in name:
                continue
            values = np.array(file.decode(name), np.float32).reshape(info.shape)
            writer.add_tensor(name, values, kind if values.ndim == 2 else "F32")
            if name.endswith("nextn.eh_proj.weight") and output is not None:
                writer.add_tensor(name.replace("eh_proj", "shared_head_head"), output, kind)
        if ids is not None:
            writer.add_tensor("d2t", np.asarray(ids, np.int64), "I64")
    return path


def _copy(file: GGUFFile, path: Path, changed: Mapping[str, Any], names: list[str]) -> None:
    with GGUFWriter(path, {**file.metadata, **changed}) as writer:
        for name in names:
            info = file.tensors[name]
            writer.add_tensor(name, file.raw(name), info.format.name, info.shape)


def add_tensors(
    writer: GGUFWriter, tensors: Mapping[str, tuple[int, ...]], kind: str, random: np.random.Generator
) -> None:
    """Add tensors of these shapes: matrices in Q8_0 if that is the `kind`, all others in F32."""
    for name, shape in tensors.items():
        if kind == "Q8_0" and len(shape) == 2:
            writer.add_tensor(name, random_blocks(random, "Q8_0", shape), "Q8_0", shape)
            continue
        values = random.standard_normal(shape)
        values = 1 + 0.1 * values if len(shape) == 1 else values * 1.5 / np.sqrt(shape[-1])
        writer.add_tensor(name, values.astype(np.float32), "F32")


def drafted_ids(rows: int, seed: int) -> np.ndarray:
    """The token ids of the rows of an output that has only some of the target's."""
    ids = np.random.default_rng(seed + 1).permutation(np.arange(3, VOCABULARY))[:rows]
    return np.sort(ids).astype(np.int64)
