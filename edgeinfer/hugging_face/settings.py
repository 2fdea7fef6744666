"""config.json in GGUF metadata."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from edgeinfer.errors import shown
from edgeinfer.hugging_face.errors import folder_error
from edgeinfer.hugging_face.families.family import Family
from edgeinfer.hugging_face.rope import Floats, rope_metadata, rope_parameters

COMMON: dict[str, tuple[str, ...]] = {
    "context_length": ("max_position_embeddings", "n_positions"),
    "embedding_length": ("hidden_size", "n_embd"),
    "block_count": ("num_hidden_layers", "n_layer"),
    "feed_forward_length": ("intermediate_size", "n_inner"),
    "attention.head_count": ("num_attention_heads", "n_head"),
    "attention.head_count_kv": ("num_key_value_heads",),
    "expert_count": ("num_local_experts", "num_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size",),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
}
"""GGUF key without the architecture -> keys of config.json."""
NORMS = {
    "rms": ("attention.layer_norm_rms_epsilon", ("rms_norm_eps", "layer_norm_epsilon")),
    "layer": (
        "attention.layer_norm_epsilon",
        ("layer_norm_eps", "norm_epsilon", "layer_norm_epsilon", "norm_eps"),
    ),
}
ACTIVATIONS = ("hidden_act", "hidden_activation", "activation_function")
WHOLE = frozenset(COMMON)


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the language model, which others may contain."""
    inner = config.get("text_config")
    return {**config, **inner} if isinstance(inner, Mapping) else dict(config)


def model_metadata(
    folder: Path, family: Family, config: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Floats]]:
    """The keys of the architecture, and the tensors of RoPE's factors.

    Raises:
        FolderError: a missing or invalid setting, or one that the architecture doesn't compute.
    """
    _check(folder, family, config)
    found = _settings(folder, family, config)
    heads, width = found["attention.head_count"], found["embedding_length"]
    tensors: dict[str, Floats] = {}
    if heads:
        found.setdefault("attention.head_count_kv", heads)
        head_dim = _whole(folder, "head_dim", config.get("head_dim") or width // heads)
        found |= {"attention.key_length": head_dim, "attention.value_length": head_dim}
        rope, tensors = rope_metadata(folder, config, head_dim, found["context_length"])
        found |= rope | _windows(folder, family, config, found)
        if scalar := config.get("query_pre_attn_scalar"):
            found["attention.scale"] = float(scalar) ** -0.5
    name = family.architecture
    keys = {f"{name}.{key}": value for key, value in {**found, **family.fixed}.items()}
    return {"general.architecture": name, **keys}, tensors


def _settings(folder: Path, family: Family, config: Mapping[str, Any]) -> dict[str, Any]:
    key, names = NORMS[family.norm]
    found: dict[str, Any] = {}
    for name, sources in {**COMMON, key: names, **family.settings}.items():
        value = next((config[source] for source in sources if config.get(source) is not None), None)
        if value is None or name in family.fixed:
            continue
        read = _whole if name in WHOLE or name.startswith("ssm.") else _number
        found[name] = read(folder, sources[0], value)
    found |= family.fixed
    if "feed_forward_length" not in found and family.architecture == "gpt2":
        found["feed_forward_length"] = 4 * found.get("embedding_length", 0)
    for name in ("context_length", "embedding_length", "block_count", "feed_forward_length",
                 "attention.head_count"):  # fmt: skip
        if name not in found:
            raise folder_error(folder, f"config.json: no {COMMON[name][0]}, wanted one")
    return found


def _whole(folder: Path, key: str, value: Any) -> int:
    if type(value) is not int or not 0 < value < 1 << 31:
        raise folder_error(folder, f"config.json: {key} {shown(value)}, wanted a positive whole number")
    return value


def _number(folder: Path, key: str, value: Any) -> float | bool:
    if isinstance(value, bool):
        return value
    if not isinstance(value, int | float) or not math.isfinite(value):
        raise folder_error(folder, f"config.json: {key} {shown(value)}, wanted a finite number")
    return float(value)


def _check(folder: Path, family: Family, config: Mapping[str, Any]) -> None:
    """Raise `FolderError` for a setting that the architecture doesn't compute."""
    for key, allowed in family.required.items():
        if key in config and config[key] not in allowed:
            raise folder_error(
                folder, f"config.json: {key} {shown(config[key])}, wanted {' or '.join(map(repr, allowed))}: "
                f"{family.architecture} computes no other"
            )  # fmt: skip
    for key in ACTIVATIONS:
        if config.get(key) not in (None, *family.activations) and family.architecture != "mamba":
            raise folder_error(
                folder, f"config.json: {key} {shown(config[key])}, wanted {' or '.join(family.activations)}"
            )


def _windows(
    folder: Path, family: Family, config: Mapping[str, Any], found: Mapping[str, Any]
) -> dict[str, Any]:
    """The keys of sliding windows; a context that is never longer than its windows needs none."""
    window, kinds = config.get("sliding_window"), config.get("layer_types")
    if window is None or (config.get("use_sliding_window") is False and not family.windows):
        return {}
    window = _whole(folder, "sliding_window", window)
    if family.window_caps_context:
        return {"context_length": min(found["context_length"], window)}
    if not family.windows:
        raise folder_error(
            folder, f"config.json: sliding_window {window}, wanted none: {family.architecture} has no windows"
        )
    layers = found["block_count"]
    if kinds is None:
        every = config.get("sliding_window_pattern") or family.windows
        kinds = ["full_attention" if (layer + 1) % every == 0 else "" for layer in range(layers)]
    pattern = [kind != "full_attention" for kind in kinds]
    usual = [(layer + 1) % family.windows != 0 for layer in range(layers)]
    keys: dict[str, Any] = {"attention.sliding_window": window}
    if pattern != usual:
        keys["attention.sliding_window_pattern"] = np.array(pattern, bool)
    local = rope_parameters(config, "sliding_attention")
    base = config.get("rope_local_base_freq")
    if base is None and "sliding_attention" in (config.get("rope_parameters") or {}):
        base = local["rope_theta"]
    return keys if base is None else {**keys, "rope.freq_base_swa": float(base)}
