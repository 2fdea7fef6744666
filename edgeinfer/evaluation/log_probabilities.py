"""Log-probabilities from logits, in float64, a few rows at a time."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float32]
LogProbabilities = npt.NDArray[np.float64]

BLOCK_ELEMENTS = 1 << 19
"""Logits converted to float64 at a time: 4 MiB, about the size of a processor's cache."""


def log_softmax(logits: npt.ArrayLike) -> LogProbabilities:
    """log(exp(x) / Σ exp(x)) over the last axis, in float64.

    The maximum is subtracted first, so that exp doesn't overflow.
    """
    values = np.asarray(logits, np.float64)
    shifted: LogProbabilities = values - values.max(axis=-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=-1, keepdims=True))
    return shifted


def row_blocks(rows: int, columns: int) -> Iterator[slice]:
    """Slices of rows of about BLOCK_ELEMENTS elements each."""
    step = max(1, BLOCK_ELEMENTS // columns)
    for first in range(0, rows, step):
        yield slice(first, min(first + step, rows))
