"""How concentrated activity is: what share of it the hottest units cover on a text that didn't choose
them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from edgeinfer_offload.runtime.activity_profile import Counts

SHARES = (0.1, 0.2, 0.3, 0.5)
JUDGED_SHARE = 0.2
MARGIN = 1.1
"""A hot set must cover so many times what as many units at random would."""


@dataclass(frozen=True)
class Coverage:
    """Of some units: the share of the second half's activations that the first half's hottest cover."""

    units: int
    active: float
    """Mean share of the units that a token uses."""
    covered: tuple[float, ...]
    """For each of SHARES; a set of units at random would cover the share itself."""

    @property
    def beats_uniform(self) -> bool:
        """Whether a static hot set pays on held-out text."""
        return self.covered[SHARES.index(JUDGED_SHARE)] > MARGIN * JUDGED_SHARE


def coverage(layers: Sequence[Counts], tokens: tuple[int, int]) -> Coverage:
    """The coverage of some layers' units together, each layer choosing its own hottest.

    Units are ranked by the first half's counts; what they cover is counted in the second half.
    """
    units = sum(counts.shape[1] for counts in layers)
    held_out = sum(int(counts[1].sum()) for counts in layers)
    used = sum(int(counts.sum()) for counts in layers)
    covered = []
    for share in SHARES:
        inside = 0.0
        for counts in layers:
            ranked = counts[1][np.argsort(-counts[0].astype(np.int64), kind="stable")].astype(np.float64)
            inside += _sum_of_first(ranked, share * len(ranked))
        covered.append(inside / held_out if held_out else 0.0)
    active = used / max(units * sum(tokens), 1)
    return Coverage(units, active, tuple(covered))


def _sum_of_first(values: "np.ndarray[tuple[int, ...], np.dtype[np.float64]]", count: float) -> float:
    """The sum of the first `count` values, the last of them in part."""
    whole = int(count)
    rest = (count - whole) * values[whole] if whole < len(values) else 0.0
    return float(values[:whole].sum() + rest)
