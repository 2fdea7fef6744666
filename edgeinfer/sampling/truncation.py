"""Truncation samplers: top-k, locally typical, top-p, min-p, XTC.

Each takes the logits (n,) of the remaining candidates and returns the positions to keep, rising. At least one
is kept.
"""

import math

import numpy as np
import numpy.typing as npt

from edgeinfer.sampling.candidates import Floats, Positions, highest, softmax

BUCKETS = 4096
FEW = 512
"""Up to this many candidates, sorting is faster than summing by buckets."""
WIDEST = 32.0
"""Span of the buckets in nats; candidates further below the best share the last one."""


def top_k(logits: Floats, k: int) -> Positions:
    """The `k` highest logits; 0 keeps all. Source: Fan et al. 2018, section 5.4 (arXiv:1805.04833)."""
    if k == 0 or k >= logits.size:
        return np.arange(logits.size)
    return np.sort(highest(logits, k))


def typical(logits: Floats, share: float) -> Positions:
    """The candidates whose surprise is closest to the entropy, until they hold more than `share`.

    Source: Meister et al. 2022, section 5 (arXiv:2202.00666).
    """
    probabilities = softmax(logits)
    with np.errstate(divide="ignore"):
        surprise = -np.log(probabilities)
    possible = probabilities > 0
    entropy = float(np.sum(probabilities[possible] * surprise[possible]))
    return _smallest_set(-np.abs(surprise - entropy), probabilities, math.nextafter(share, math.inf))


def top_p(logits: Floats, share: float) -> Positions:
    """The smallest set of most probable candidates with a total probability of at least `share`.

    Source: Holtzman et al. 2020, section 3.1 (arXiv:1904.09751).
    """
    return _smallest_set(logits, softmax(logits), share)


def min_p(logits: Floats, ratio: float) -> Positions:
    """The candidates at least `ratio` times as probable as the best. Source: arXiv:2407.01082."""
    if ratio == 0:
        return np.arange(logits.size)
    return np.flatnonzero(logits >= logits.max() + math.log(ratio))


def xtc(logits: Floats, threshold: float) -> Positions:
    """Excludes the candidates with at least the probability `threshold`, except the least probable of them.

    Two candidates can't both be above one half, so such a threshold has no effect.
    Source: github.com/oobabooga/text-generation-webui, pull request 6335.
    """
    probabilities = softmax(logits)
    reaching = np.flatnonzero(probabilities >= threshold)
    if threshold > 0.5 or reaching.size < 2:
        return np.arange(logits.size)
    falling = highest(probabilities[reaching], reaching.size)
    stays = np.ones(logits.size, dtype=bool)
    stays[reaching[falling[:-1]]] = False
    return np.flatnonzero(stays)


def _smallest_set(keys: Floats, probabilities: npt.NDArray[np.float64], share: float) -> Positions:
    """The smallest set of candidates with the highest keys that reaches `share` of probability, rising.

    Many candidates are summed by buckets of the key; only the bucket that reaches `share` is sorted.
    """
    if keys.size <= FEW:
        falling = highest(keys, keys.size)
        needed = int(np.searchsorted(np.cumsum(probabilities[falling]), share)) + 1
        return np.sort(falling[:needed])
    below_peak = (keys.max() - keys) * (BUCKETS / WIDEST)
    bucket = np.minimum(below_peak, BUCKETS - 1).astype(np.int64)
    reached_by = np.cumsum(np.bincount(bucket, weights=probabilities, minlength=BUCKETS))
    last = min(int(np.searchsorted(reached_by, share)), BUCKETS - 1)
    inside, edge = np.flatnonzero(bucket < last), np.flatnonzero(bucket == last)
    edge = edge[highest(keys[edge], edge.size)]
    missing = share - probabilities[inside].sum()
    needed = int(np.searchsorted(np.cumsum(probabilities[edge]), missing)) + 1
    return np.sort(np.concatenate([inside, edge[:needed]]))
