"""Log-probabilities of tokens under the model, before any sampler."""

import math

import numpy as np
import numpy.typing as npt

from edgeinfer.sampling.candidates import highest


def logprobs(
    logits: npt.NDArray[np.float32], sampled: int, top_n: int = 0
) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Natural log-probability of `sampled` and of the `top_n` best, from raw logits (V,).

    Returns that of the sampled token, and pairs (id, log-probability), falling, lowest id first among equals.
    """
    peak = float(logits.max())
    # The peak is subtracted first: added to the logarithm, a large one would absorb it.
    total = math.log(float(np.exp(logits - peak).sum(dtype=np.float64)))
    best = highest(logits, top_n) if top_n > 0 else ()
    top = tuple((int(token_id), float(logits[token_id]) - peak - total) for token_id in best)
    return float(logits[sampled]) - peak - total, top
