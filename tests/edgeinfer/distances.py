"""How far results are from others."""

from typing import Any

import numpy as np
import numpy.typing as npt

Rows = npt.NDArray[np.floating[Any]]


def distance(actual: Rows, expected: Rows) -> float:
    """Relative to the expected values."""
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


def median_distance(actual: Rows, expected: Rows) -> float:
    """Of the tokens; an expert that changes at a near-tie costs a few."""
    return float(np.median([distance(row, other) for row, other in zip(actual, expected, strict=True)]))
