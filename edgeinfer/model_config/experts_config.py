"""The MoE sizes of a model, as in its file."""

from dataclasses import dataclass

from edgeinfer_kernels.blocks.moe import Gating

MAX_EXPERTS = 1024
GATINGS: dict[int, Gating] = {1: "softmax", 2: "sigmoid", 3: "softmax_of_selected"}
"""The meaning of expert_gating_func values."""


@dataclass(frozen=True)
class ExpertsConfig:
    """The MoE config, the same in all layers after the first `dense_layers`."""

    count: int
    experts_per_token: int
    feed_forward: int
    """Length of an expert's intermediate activations; `shared`: of the shared expert's, 0: there is none."""
    shared: int
    gating: Gating
    normalized: bool
    scale: float
    dense_layers: int
