"""RoPE scaling, from metadata to one inverse frequency per pair: linear, Llama 3 factors, YaRN and LongRoPE.

All of them multiply a pair's frequency by a constant, so that the position is used in one formula only. YaRN:
Peng et al. 2023, §3; LongRoPE: Ding et al. 2024.
"""

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgeinfer.errors import UnsupportedModelError
from edgeinfer_kernels.blocks.common.rope import RopeSpec

MAX_FREQUENCY, MAX_MAGNITUDE = 1e6, 1e3
Factors = npt.NDArray[np.float32]


@dataclass(frozen=True)
class RopeScaling:
    """`factor` > 1 extends the context; `attention_factor` multiplies cosine and sine."""

    kind: str = "none"
    factor: float = 1.0
    original_context: int = 0
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    extrapolation: float = 1.0
    log_multiplier: float = 0.0


def yarn_ramp(dimensions: int, base: float, scaling: RopeScaling) -> npt.NDArray[np.float64]:
    """1 for pairs that keep their frequency (high frequencies), 0 for interpolated ones, linear between."""

    def pair_of(rotations: float) -> float:
        ratio = scaling.original_context / (rotations * 2 * math.pi)
        return dimensions * math.log(ratio) / (2 * math.log(base))

    low = max(0.0, math.floor(pair_of(scaling.beta_fast)))
    high = min(dimensions - 1.0, math.ceil(pair_of(scaling.beta_slow)))
    position = (np.arange(dimensions // 2) - low) / max(0.001, high - low)
    return np.asarray((1 - np.clip(position, 0, 1)) * scaling.extrapolation)


def yarn_magnitude(scaling: RopeScaling) -> float:
    """√(1/t) of the paper: 1 + 0.1·ln(factor), or the quotient that a log multiplier requires."""

    def magnitude(multiplier: float) -> float:
        return 0.1 * multiplier * math.log(scaling.factor) + 1 if scaling.factor > 1 else 1.0

    if scaling.log_multiplier:
        return magnitude(1.0) / magnitude(scaling.log_multiplier)
    return magnitude(1.0)


def rope_specification(
    dimensions: int, base: float, neox: bool, scaling: RopeScaling, factors: Factors | None
) -> RopeSpec:
    """The pairs' frequencies, base^(-2i/dimensions), divided by `factors`, then scaled.

    Raises `UnsupportedModelError`: the file's values exceed `MAX_FREQUENCY` or `MAX_MAGNITUDE`.
    """
    try:
        with np.errstate(all="ignore"):
            frequencies, magnitude = _scaled(dimensions, base, scaling, factors)
    except (ValueError, ArithmeticError) as error:
        raise _out_of_range(base, scaling) from error
    is_usable = np.isfinite(frequencies).all() and (np.abs(frequencies) <= MAX_FREQUENCY).all()
    if not is_usable or not 0 < magnitude <= MAX_MAGNITUDE:
        raise _out_of_range(base, scaling)
    return RopeSpec(tuple(frequencies.tolist()), neox, magnitude)


def _out_of_range(base: float, scaling: RopeScaling) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"rope.scaling: base {base:g}, factor {scaling.factor:g}, attn_factor {scaling.attention_factor:g}, "
        f"beta {scaling.beta_fast:g} and {scaling.beta_slow:g}, ext_factor {scaling.extrapolation:g}, "
        f"log_multiplier {scaling.log_multiplier:g}: wanted values that give finite frequencies of at most "
        f"{MAX_FREQUENCY:g} and a magnitude from 0 to {MAX_MAGNITUDE:g}"
    )


def _scaled(
    dimensions: int, base: float, scaling: RopeScaling, factors: Factors | None
) -> tuple[npt.NDArray[np.float64], float]:
    """The pairs' frequencies, and the factor of cosine and sine."""
    frequencies = base ** (-np.arange(0, dimensions, 2, dtype=np.float64) / dimensions)
    if factors is not None:
        frequencies = frequencies / factors.astype(np.float64)
    magnitude = scaling.attention_factor
    if scaling.kind == "yarn":
        ramp = yarn_ramp(dimensions, base, scaling)
        frequencies = frequencies * (ramp + (1 - ramp) / scaling.factor)
        magnitude *= yarn_magnitude(scaling)
    elif scaling.kind != "none":
        frequencies = frequencies / scaling.factor
    return frequencies, magnitude
