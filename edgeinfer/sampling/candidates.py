"""Partial sorting: the best few of many candidates, and their log-probabilities."""

import math

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32] | npt.NDArray[np.float64]
Positions = npt.NDArray[np.int64]

COLDEST = 1e-30
"""Minimum temperature by which a float32 can be divided; only the maximum and its equals survive it."""
COLUMNS = 2048
FEW_COLUMNS = 512
"""Column count for small vocabularies: with fewer columns their maxima are partitioned faster."""


def highest(keys: Floats, count: int) -> Positions:
    """Positions of the `count` highest keys, falling; the lowest position first among equals.

    Reads `keys` (n,) three times and sorts only `count` values.
    """
    if count >= keys.size:
        return np.argsort(-keys, kind="stable")
    positions = np.flatnonzero(keys >= _lower_bound(keys, count))
    values = keys[positions]
    if positions.size > count:
        threshold = np.partition(values, values.size - count)[values.size - count]
        above = values > threshold
        equal = np.flatnonzero(values == threshold)[: count - np.count_nonzero(above)]
        above[equal] = True
        positions, values = positions[above], values[above]
    return positions[np.argsort(-values, kind="stable")]


def _lower_bound(keys: Floats, count: int) -> float:
    """A value that at least `count` keys reach, close to the one that exactly `count` reach.

    The keys are arranged in columns. If `count` columns have a maximum of at least x, then at least `count`
    keys do. Column maxima cost one pass at memory speed; a partition costs ten.
    """
    columns = COLUMNS if keys.size > 8 * COLUMNS or count > FEW_COLUMNS // 4 else FEW_COLUMNS
    rows = keys.size // columns
    if rows < 4 or count > columns // 4:
        return float(keys.min()) if keys.size else 0.0
    maxima = keys[: rows * columns].reshape(rows, columns).max(axis=0)
    return float(np.partition(maxima, columns - count)[columns - count])


def softmax(logits: Floats) -> npt.NDArray[np.float64]:
    """Probabilities (n,) of logits (n,), float64; a logit of -inf gets 0."""
    weights = np.exp(logits - logits.max())
    total = weights.sum(dtype=np.float64)
    return np.asarray(weights / total, dtype=np.float64)


def tempered_softmax(logits: Floats, temperature: float) -> npt.NDArray[np.float64]:
    """Softmax (n,) of logits over temperature; the peak is subtracted first, so no temperature overflows."""
    with np.errstate(over="ignore", under="ignore"):
        weights = np.exp((logits - logits.max()) / max(temperature, COLDEST))
    return np.asarray(weights / weights.sum(dtype=np.float64), dtype=np.float64)


def logprobs(logits: Floats, sampled: int, top_n: int = 0) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Natural log-probability of `sampled` and of the `top_n` best, from raw logits (V,).

    Returns that of the sampled token, and pairs (id, log-probability), falling, lowest id first among equals.
    """
    peak = float(logits.max())
    # The peak is subtracted first: added to the logarithm, a large one would absorb it.
    total = math.log(float(np.exp(logits - peak).sum(dtype=np.float64)))
    best = highest(logits, top_n) if top_n > 0 else ()
    top = tuple((int(token_id), float(logits[token_id]) - peak - total) for token_id in best)
    return float(logits[sampled]) - peak - total, top
