"""Small files of Step 3.5 with several draft heads and seeded random weights."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from tests.model_zoo import ZOO
from tests.random_hybrids import patterned_heads
from tests.random_models import RandomModel

STEP35 = ZOO["step35"]
LAYERS, HEADS = 4, 2


@dataclass(frozen=True)
class StepHeads(RandomModel):
    """The last `HEADS` of its layers are draft heads."""

    own_outputs: bool = False
    """Each head has a norm and an output matrix."""

    def metadata(self) -> dict[str, Any]:
        return {**super().metadata(), "step35.nextn_predict_layers": HEADS}

    def tensors(self) -> dict[str, tuple[int, ...]]:
        shapes = super().tensors()
        for layer in range(self.layers - HEADS, self.layers):
            name = f"blk.{layer}.nextn"
            shapes |= {f"{name}.{part}.weight": (self.width,) for part in ("enorm", "hnorm")}
            shapes[f"{name}.eh_proj.weight"] = (self.width, 2 * self.width)
            if self.own_outputs:
                shapes[f"{name}.shared_head_norm.weight"] = (self.width,)
                shapes[f"{name}.shared_head_head.weight"] = (self.vocabulary, self.width)
        return shapes


def step_heads(own_outputs: bool = False) -> StepHeads:
    """A model of four layers with and without windows, and two heads, the first of which has a window."""
    limits = {"swiglu_clamp_exp": (0, 0, 0.4, 0, 0.7, 0.6), "swiglu_clamp_shexp": (0.5, 0, 0, 0.3, 0.6, 0)}
    extra = {**STEP35.extra, **{key: np.array(values, np.float32) for key, values in limits.items()}}
    return StepHeads(
        **{**vars(STEP35), "layers": LAYERS + HEADS, "hybrid": patterned_heads("gwwgwg"), "extra": extra},
        own_outputs=own_outputs,
    )
