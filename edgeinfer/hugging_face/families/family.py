"""What a row of the table of families says: names of tensors, settings, and changes of layout."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from edgeinfer.hugging_face.families.names import ATTENTION, ENDS, FEED_FORWARD, NORMS

Names = Mapping[str, str]
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
    windows: int = 0
    window_caps_context: bool = False
