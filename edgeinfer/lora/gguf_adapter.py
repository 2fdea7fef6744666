"""Reads a LoRA adapter from a GGUF file, as llama.cpp's convert_lora_to_gguf.py writes it.

Source: llama.cpp, src/llama-adapter.cpp. The factor is adapter.lora.alpha / rank, or 1 without an alpha.
"""

import hashlib
import math
from pathlib import Path
from typing import Any

import numpy as np

from edgeinfer.errors import shortened, shown
from edgeinfer.lora.adapter import EMBEDDING, Adapter, AdapterTensor, adapter_error, checked_pair
from edgeinfer_quant_formats import GGUFFile
from edgeinfer_quant_formats.errors import FormatError

SUFFIXES = (".lora_a", ".lora_b")


def read_gguf_adapter(path: Path, architecture: str) -> Adapter:
    """The adapter in a file, for a model of this architecture.

    Raises:
        AdapterError: it is no adapter of such a model, or has a tensor that is no LoRA pair.
        FormatError, OSError: the file is damaged, or can't be read.
    """
    with GGUFFile.open(path) as file:
        alpha = _checked_metadata(path, file, architecture)
        pairs = _pairs(path, file)
        tensors = {name: _tensor(path, file, name, alpha) for name in pairs}
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return Adapter(path, tensors, digest)


def _checked_metadata(path: Path, file: GGUFFile, architecture: str) -> float:
    """The alpha of an adapter's file; 0: it has none."""
    seen: Any
    for key, wanted in (("general.type", "adapter"), ("adapter.type", "lora")):
        if not file.has_text(key, wanted):
            seen = file.metadata.get(key)
            raise adapter_error(path, f"{key}: saw {shown(seen)}, wanted {wanted!r}: it is no LoRA adapter")
    if not file.has_text("general.architecture", architecture):
        seen = file.metadata.get("general.architecture")
        raise adapter_error(path, f"it is for models of {shown(seen)}, wanted one for {architecture!r}")
    if "adapter.alora.invocation_tokens" in file.metadata:
        raise adapter_error(
            path, "it is an activated LoRA (adapter.alora.invocation_tokens), wanted a plain one"
        )
    alpha = file.metadata.get("adapter.lora.alpha", 0.0)
    if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not math.isfinite(alpha):
        raise adapter_error(path, f"adapter.lora.alpha: saw {shown(alpha)}, wanted a finite number")
    return float(alpha)


def _pairs(path: Path, file: GGUFFile) -> list[str]:
    """The names of the tensors that the adapter changes."""
    names: dict[str, None] = {}
    for name in file.tensors:
        base, suffix = name[: -len(SUFFIXES[0])], name[-len(SUFFIXES[0]) :]
        if suffix not in SUFFIXES:
            raise adapter_error(
                path, f"tensor {shortened(name)}: wanted names that end in .lora_a or .lora_b only"
            )
        names[base] = None
    for name in names:
        for suffix in SUFFIXES:
            if name + suffix not in file.tensors:
                raise adapter_error(
                    path, f"tensor {shortened(name)}{suffix} is missing, wanted both of a pair"
                )
    if not names:
        raise adapter_error(path, "it has no tensors, wanted pairs of lora_a and lora_b")
    return list(names)


def _tensor(path: Path, file: GGUFFile, name: str, alpha: float) -> AdapterTensor:
    try:
        a, b = (file.decode(name + suffix) for suffix in SUFFIXES)
    except FormatError as error:
        raise adapter_error(path, str(error)) from error
    if name == EMBEDDING and a.ndim == b.ndim == 2:  # a is (vocabulary, rank), b (hidden size, rank)
        a, b = b.T, a
    pair = checked_pair(path, name, a, b)
    factor = alpha / pair.b.shape[-1] if alpha else 1.0
    return AdapterTensor(pair.a, (pair.b * np.float32(factor)))
