"""RoPE of a config.json in GGUF metadata, with the tensors of factors that some scalings need."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeinfer.errors import shown
from edgeinfer.hugging_face.errors import folder_error

Floats = npt.NDArray[np.float32]
DEFAULT_BASE = 10000.0


def rope_parameters(config: Mapping[str, Any], layers: str) -> dict[str, Any]:
    """The parameters of RoPE in layers of a kind ("full_attention", "sliding_attention"), in either layout of
    config.json; of both the older one counts, as in transformers.
    """
    given = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if layers in given:
        given = given[layers] or {}
    elif any(isinstance(value, Mapping) for value in given.values()):
        given = {}
    named = dict(given)
    named.setdefault("rope_type", named.get("type") or "default")
    named.setdefault("rope_theta", config.get("rope_theta") or config.get("rotary_emb_base"))
    named["rope_theta"] = named["rope_theta"] or DEFAULT_BASE
    return named


def rope_dimensions(config: Mapping[str, Any], head_dim: int) -> int:
    """Dimensions of a head that RoPE rotates."""
    share = rope_parameters(config, "full_attention").get("partial_rotary_factor")
    if share is None:
        share = config.get("partial_rotary_factor", config.get("rotary_pct", 1.0))
    return int(head_dim * float(1.0 if share is None else share))


def rope_metadata(
    folder: Path, config: Mapping[str, Any], head_dim: int, trained: int
) -> tuple[dict[str, Any], dict[str, Floats]]:
    """The keys without the architecture, and the tensors. Raises `FolderError`: an unknown scaling."""
    given = rope_parameters(config, "full_attention")
    dimensions = rope_dimensions(config, head_dim)
    found: dict[str, Any] = {
        "rope.dimension_count": dimensions,
        "rope.freq_base": float(given["rope_theta"]),
    }
    kind, factor = str(given["rope_type"]), float(given.get("factor") or 1.0)
    original = given.get("original_max_position_embeddings") or config.get("original_max_position_embeddings")
    if kind == "default":
        return found, {}
    if kind == "linear":
        return {**found, "rope.scaling.type": "linear", "rope.scaling.factor": factor}, {}
    if kind == "llama3":
        return found, {"rope_freqs.weight": _llama3_factors(given, dimensions)}
    if kind == "yarn" and given.get("truncate", True) and not given.get("mscale_all_dim"):
        magnitude = 0.1 * math.log(factor) + 1 if factor > 1 else 1.0
        own = given.get("attention_factor")
        scaling = {
            "type": "yarn",
            "factor": factor,
            "original_context_length": int(original or trained),
            "yarn_beta_fast": float(given.get("beta_fast") or 32),
            "yarn_beta_slow": float(given.get("beta_slow") or 1),
            "attn_factor": 1.0 if own is None else float(own) / magnitude,
        }
        return {**found, **{f"rope.scaling.{key}": value for key, value in scaling.items()}}, {}
    if kind in ("longrope", "su") and original:
        return _long_rope(folder, given, found, int(original), trained)
    raise folder_error(
        folder, f"config.json: rope_type {shown(kind)}, wanted default, linear, llama3, yarn or longrope"
    )


def _long_rope(
    folder: Path, given: Mapping[str, Any], found: dict[str, Any], original: int, trained: int
) -> tuple[dict[str, Any], dict[str, Floats]]:
    pairs = found["rope.dimension_count"] // 2
    tensors = {}
    for name in ("long", "short"):
        factors = np.asarray(given.get(f"{name}_factor"), np.float32)
        if factors.shape != (pairs,):
            raise folder_error(folder, f"config.json: {name}_factor of shape {factors.shape}, wanted {pairs}")
        tensors[f"rope_factors_{name}.weight"] = factors
    scale = float(given.get("factor") or trained / original)
    own = given.get("attention_factor")
    magnitude = 1.0 if scale <= 1 else math.sqrt(1 + math.log(scale) / math.log(original))
    found["rope.scaling.type"] = "longrope"
    found["rope.scaling.original_context_length"] = original
    found["rope.scaling.attn_factor"] = magnitude if own is None else float(own)
    return found, tensors


def _llama3_factors(given: Mapping[str, Any], dimensions: int) -> Floats:
    """Divisors of the frequencies: 1 for short waves, `factor` for long ones, between them interpolated."""
    base, factor = float(given["rope_theta"]), float(given.get("factor", 8.0))
    low, high = float(given.get("low_freq_factor", 1.0)), float(given.get("high_freq_factor", 4.0))
    original = float(given.get("original_max_position_embeddings", 8192))
    waves = 2 * math.pi * base ** (np.arange(0, dimensions, 2, dtype=np.float64) / dimensions)
    smooth = (original / waves - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    return np.where(waves < original / high, 1.0, np.where(waves > original / low, factor, between)).astype(
        np.float32
    )
