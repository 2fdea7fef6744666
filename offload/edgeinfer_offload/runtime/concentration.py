"""How concentrated activations are: the share that the hottest units cover on held-out text."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgeinfer_kernels.sizes.model_sizes import ModelSizes
from edgeinfer_offload.runtime.activity_profile import ActivityProfile, Counts

SHARES = (0.1, 0.2, 0.3, 0.5)
EVALUATED_SHARE = 0.2
MARGIN = 1.1
"""A hot set must cover this many times as much as a random set of the same size."""


@dataclass(frozen=True)
class Coverage:
    """For some units: the share of the second half's activations covered by the hottest units of the first
    half.
    """

    granules: int
    active: float
    """Mean share of the units that a token activates."""
    covered: tuple[float, ...]
    """One value for each of SHARES; a random set of units would cover the share itself."""

    @property
    def beats_uniform(self) -> bool:
        """Whether a static hot set helps on held-out text."""
        return self.covered[SHARES.index(EVALUATED_SHARE)] > MARGIN * EVALUATED_SHARE


def coverage(layers: Sequence[Counts], tokens: tuple[int, int]) -> Coverage:
    """The joint coverage of the units of `layers`; the hottest units are selected per layer.

    Units are ranked by the counts of the first half of the text; coverage is counted in the second half.
    """
    granules = sum(counts.shape[1] for counts in layers)
    held_out = sum(int(counts[1].sum()) for counts in layers)
    used = sum(int(counts.sum()) for counts in layers)
    covered = []
    for share in SHARES:
        inside = 0.0
        for counts in layers:
            ranked = counts[1][np.argsort(-counts[0].astype(np.int64), kind="stable")].astype(np.float64)
            inside += _sum_of_first(ranked, share * len(ranked))
        covered.append(inside / held_out if held_out else 0.0)
    active = used / max(granules * sum(tokens), 1)
    return Coverage(granules, active, tuple(covered))


def _sum_of_first(values: "np.ndarray[tuple[int, ...], np.dtype[np.float64]]", count: float) -> float:
    """The sum of the first `count` values; a fractional count includes part of the last one."""
    whole = int(count)
    remainder = (count - whole) * values[whole] if whole < len(values) else 0.0
    return float(values[:whole].sum() + remainder)


def expert_probs(profile: ActivityProfile, sizes: ModelSizes) -> tuple[tuple[float, ...], ...] | None:
    """For each layer, the mean number of uses of each expert per token; () for a dense layer.

    The hottest experts of a layer are learned from one half of the text. If they don't beat random ones on
    the other half, the layer's probabilities are uniform. None: the profile has no data on these experts.
    """
    counted = profile.layers("experts")
    probs: list[tuple[float, ...]] = []
    for index, layer in enumerate(sizes.layers):
        block = layer.routed
        if block is None:
            probs.append(())
            continue
        counts, count, used = counted.get(index), block.granules, block.granules_per_token
        if counts is None or counts.shape[1] != count or not counts.sum():
            return None
        if coverage([counts], profile.tokens).beats_uniform:
            each = counts.sum(axis=0).astype(float)
            probs.append(tuple(float(used * share) for share in each / each.sum()))
        else:
            probs.append((used / count,) * count)
    return tuple(probs) if any(probs) else None
