"""Small files with draft heads that have separate entries in the arrays of the file, and random weights."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.model_zoo import ZOO
from tests.random_hybrids import mamba_layers, patterned_heads, short_values
from tests.random_models import RandomModel

STEP35, MIMO2 = ZOO["step35"], ZOO["mimo2"]
LAYERS, HEADS = 4, 2


@dataclass(frozen=True)
class ModelWithHeads(RandomModel):
    """The last ones of its layers are draft heads."""

    draft_heads: int = HEADS
    norm_name: str = ""
    """The norm that each head has; "": none."""
    own_outputs: bool = False
    """Each head has an output matrix."""

    def metadata(self) -> dict[str, Any]:
        return {**super().metadata(), f"{self.architecture}.nextn_predict_layers": self.draft_heads}

    def tensors(self) -> dict[str, tuple[int, ...]]:
        shapes = super().tensors()
        for layer in range(self.layers - self.draft_heads, self.layers):
            name = f"blk.{layer}.nextn"
            shapes |= {f"{name}.{part}.weight": (self.width,) for part in ("enorm", "hnorm")}
            shapes[f"{name}.eh_proj.weight"] = (self.width, 2 * self.width)
            if self.norm_name:
                shapes[f"blk.{layer}.{self.norm_name}.weight"] = (self.width,)
            if self.own_outputs:
                shapes[f"{name}.shared_head_head.weight"] = (self.vocabulary, self.width)
        return shapes


def step_heads(own_outputs: bool = False, layers: int = LAYERS) -> ModelWithHeads:
    """A model of layers with and without windows, and two heads, the first of which has a window."""
    rest = (0,) * (layers - LAYERS)
    limits = {
        "swiglu_clamp_exp": (0, 0, 0.4, 0, *rest, 0.7, 0.6),
        "swiglu_clamp_shexp": (0.5, 0, 0, 0.3, *rest, 0.6, 0),
    }
    extra = {**STEP35.extra, **{key: np.array(values, np.float32) for key, values in limits.items()}}
    return ModelWithHeads(
        **{
            **vars(STEP35),
            "layers": layers + HEADS,
            "hybrid": patterned_heads(("gwwg" * layers)[:layers] + "wg"),
            "extra": extra,
        },
        norm_name="nextn.shared_head_norm" if own_outputs else "",
        own_outputs=own_outputs,
    )


def mimo_heads(own_outputs: bool = False, layers: int = LAYERS) -> ModelWithHeads:
    """A model of layers with and without windows, and two dense heads with windows and fused queries,
    keys and values. `own_outputs`: else a head has a norm with the name that files of MiMo-V2 have.
    """
    pattern = ("gwwg" * layers)[:layers] + "ww"
    hybrid = short_values(pattern, 16, fused=True, dense_from=layers)
    return ModelWithHeads(
        **{**vars(MIMO2), "layers": layers + HEADS, "hybrid": hybrid},
        norm_name="nextn.shared_head_norm" if own_outputs else "layer_output_norm",
        own_outputs=own_outputs,
    )


def nemotron_head(latent: bool = False) -> ModelWithHeads:
    """A model of single blocks, and a head of attention and experts, which may read a latent projection."""
    base = ZOO["nemotron_h_moe-latent" if latent else "nemotron_h_moe"]
    hybrid = mamba_layers("mfafh", 4, 16, 32, groups=2)
    return ModelWithHeads(
        **{**vars(base), "layers": 5, "hybrid": hybrid, "seed": 1},
        draft_heads=1,
        norm_name="nextn.shared_head_norm",
    )


HEADS_OF = {"step35": step_heads, "mimo2": mimo_heads}
