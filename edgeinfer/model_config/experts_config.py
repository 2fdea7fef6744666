"""The sizes of a model's mixtures of experts, as its file gives them."""

from dataclasses import dataclass

from edgeinfer_kernels.specification import Gating

MAX_EXPERTS = 1024
GATINGS: dict[int, Gating] = {1: "softmax", 2: "sigmoid", 3: "softmax_of_chosen"}
"""What the numbers of expert_gating_func mean."""


@dataclass(frozen=True)
class ExpertsConfig:
    """The mixtures of experts, alike in all layers behind the first `dense_layers`."""

    count: int
    used: int
    feed_forward: int
    """Elements of an expert's hidden row; `shared`: of the shared expert's, 0: there is none."""
    shared: int
    gating: Gating
    normalized: bool
    scale: float
    dense_layers: int
