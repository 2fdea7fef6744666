"""What a row of the table of families says: names of tensors, settings, and changes of layout."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from edgeinfer.hugging_face.families.names import ATTENTION, ENDS, FEED_FORWARD, NORMS

Names = Mapping[str, str]
Order = npt.NDArray[np.integer]
LAYER = re.compile(r"(\d+)\.(.+)")
EXPERT = re.compile(r"\.(\d+)\.")
MAX_LAYERS = 4096
Layout = Literal["query_key_value_by_head", "transposed", "gate_up_experts", "negative_exp", "squeezed"]


@dataclass(frozen=True)
class Family:
    """One family. `ends`: names of the folder's tensors outside of layers -> names in GGUF; `layer`: those of
    a layer without its `prefix`, in which an asterisk is an expert's number.

    - `permuted`: rows of queries and keys are in RoPE's order of Hugging Face, which pairs (i, i + d/2), and
      GGUF's pairs (2i, 2i + 1).
    - `norm_offset`: added to the weights of norms that this is left out of.
    - `layouts`: GGUF name -> how the tensor is changed.
    - `settings`: GGUF key -> keys of config.json besides the common ones.
    - `fixed`: GGUF key -> value.
    - `required`: key of config.json -> values that the architecture computes; others are refused. A missing
      key is allowed.
    - `skipped`: beginnings of the names of modules that a model of text doesn't have.
    - `windows`: every n-th layer has global attention by default; 0: no windows. `window_caps_context`: the
      windows are longer than the context that is allowed.
    """

    architecture: str
    ends: Names = field(default_factory=lambda: ENDS)
    layer: Names = field(default_factory=lambda: {**NORMS, **ATTENTION, **FEED_FORWARD})
    prefix: str = "model.layers."
    norm: Literal["rms", "layer"] = "rms"
    permuted: bool = False
    norm_offset: float = 0.0
    layouts: Mapping[str, Layout] = field(default_factory=dict)
    settings: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    required: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    activations: tuple[str, ...] = ("silu", "swish")
    skipped: tuple[str, ...] = ()
    windows: int = 0
    window_caps_context: bool = False

    def gguf_name(self, module: str) -> str | None:
        """The name of a module's tensors in GGUF, without suffix; None: the family has no such module."""
        if module in self.ends:
            return self.ends[module]
        layer = self._layer_module(module)
        name = None if layer is None else self.layer.get(EXPERT.sub(".*.", layer[1]))
        return None if name is None or layer is None else f"blk.{layer[0]}.{name}"

    def expert(self, module: str) -> int | None:
        """The number of the expert whose module this is; None: it is of none."""
        layer = self._layer_module(module)
        match = EXPERT.search(layer[1]) if layer else None
        return int(match[1]) if match else None

    def _layer_module(self, module: str) -> tuple[int, str] | None:
        """The number of a module's layer, and its name there."""
        match = LAYER.fullmatch(module.removeprefix(self.prefix)) if module.startswith(self.prefix) else None
        return (int(match[1]), match[2]) if match and int(match[1]) < MAX_LAYERS else None


def plain_name(name: str) -> str:
    """The name of a tensor in a model of text only, of which one with images has a prefix."""
    for prefix in ("language_model.model.", "model.language_model."):
        if name.startswith(prefix):
            return f"model.{name.removeprefix(prefix)}"
    return name.removeprefix("language_model.") if name.startswith("language_model.lm_head") else name


def rope_pairs(rows: int, heads: int) -> Order:
    """The order in which rows of the first and the second part of each head alternate."""
    return np.arange(rows).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)


def by_part(rows: int, heads: int) -> Order:
    """The order of rows with all queries first, then all keys and all values."""
    return np.arange(rows).reshape(heads, 3, -1).swapaxes(0, 1).reshape(-1)
