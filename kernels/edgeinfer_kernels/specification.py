"""The specification of a decoder: what it computes, the same for all backends and model families."""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

FloatVector = npt.NDArray[np.float32]


@dataclass(frozen=True)
class NormSpecification:
    """x / √(mean x² + ε) (rms) or (x - mean) / √(variance + ε) (layer), times weight, plus bias if given."""

    kind: Literal["rms", "layer"]
    epsilon: float


@dataclass(frozen=True)
class RopeSpecification:
    """RoPE: pair i is rotated by position · inverse_frequencies[i]; all scalings are already applied.

    `halves`: pairs are (i, i + dimensions/2) as in NeoX; otherwise (2i, 2i + 1). Cosine and sine are
    multiplied by `magnitude`.
    """

    inverse_frequencies: tuple[float, ...]
    halves: bool
    magnitude: float = 1.0

    @property
    def dimensions(self) -> int:
        return 2 * len(self.inverse_frequencies)

    def table(self, start: int, count: int, dtype: npt.DTypeLike = np.float32) -> npt.NDArray[np.floating]:
        """(count, dimensions): the cosines, then the sines, of positions start…"""
        positions = np.arange(start, start + count, dtype=np.float64)
        angles = positions[:, None] * np.asarray(self.inverse_frequencies, np.float64)
        both = np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * self.magnitude
        return np.ascontiguousarray(both.astype(dtype))


@dataclass(frozen=True)
class AttentionSpecification:
    """Attention of one layer. `window`: a token attends to itself and the window - 1 tokens before it; 0: no
    limit. soft_cap 0: none. `sinks`: the softmax of every head has one more score, a learned weight, without
    a value.
    """

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    norm: NormSpecification
    rope: RopeSpecification | None
    qk_norm: Literal["none", "head", "row"] = "none"
    window: int = 0
    soft_cap: float = 0.0
    residual_scale: float = 1.0
    sinks: bool = False


Activation = Literal["silu", "gelu", "relu", "relu_squared", "clamped_swiglu"]
CLAMPED_SWIGLU_SLOPE = 1.702
CLAMPED_SWIGLU_LIMIT = 7.0
"""clamped_swiglu: with g = min(gate, limit) and u = up within ±limit, g · sigmoid(slope · g) · (u + 1).
Source: gpt-oss.
"""


@dataclass(frozen=True)
class FeedForwardSpecification:
    """One layer's feed-forward: down(activation(gate(x)) · up(x)); without a gate down(activation(up(x)))."""

    activation: Activation
    norm: NormSpecification
    residual_scale: float = 1.0


Gating = Literal["softmax", "sigmoid", "softmax_of_chosen"]
MIN_WEIGHT_SUM = 2.0**-14
"""Minimum divisor of the selected experts' weights: the smallest normal float16."""


@dataclass(frozen=True)
class ExpertsSpecification:
    """One MoE layer: the router selects `used` of `count` experts for each token.

    With scores s = router(h), the experts with the largest s are selected; ties go to the lower index.
    `gating` defines their weights: softmax(s) over all experts, sigmoid(s), or softmax over the selected
    ones. If `normalized`, they are divided by their sum (at least MIN_WEIGHT_SUM); then they are multiplied
    by `scale`. The result is Σ weight · expert(h), plus that of the shared expert if there is one. `early`:
    pre-attention router, which reads the layer's input without a norm.
    """

    activation: Activation
    norm: NormSpecification
    count: int
    used: int
    gating: Gating
    normalized: bool
    scale: float = 1.0
    early: bool = False
    residual_scale: float = 1.0


@dataclass(frozen=True)
class LayerSpecification:
    attention: AttentionSpecification
    feed_forward: FeedForwardSpecification | ExpertsSpecification


@dataclass(frozen=True)
class DecoderSpecification:
    """The whole decoder. Logits are multiplied by `logit_scale`, then soft-capped if logit_soft_cap is
    not 0.
    """

    width: int
    vocabulary_size: int
    layers: tuple[LayerSpecification, ...]
    norm: NormSpecification
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_soft_cap: float = 0.0

    def of_layers(self, first: int, last: int) -> "DecoderSpecification":
        """The same specification with only layers first..last."""
        return replace(self, layers=self.layers[first:last])
