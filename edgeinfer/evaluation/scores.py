"""A few numbers per scored token; distributions are not stored."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgeinfer.errors import EdgeInferError

Logits = npt.NDArray[np.float32]
LogProbabilities = npt.NDArray[np.float64]

BLOCK_ELEMENTS = 1 << 19
"""Logits converted to float64 at a time: 4 MiB, about the size of a processor's cache."""
Column = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Scores:
    """Scored tokens, one column per value; without a base the last three columns are empty."""

    loss: Column
    """-log p of the token, in nats."""
    base_loss: Column
    divergence: Column
    """Σ p_base (log p_base - log p) over the vocabulary, in nats."""
    same_top: npt.NDArray[np.bool_]
    """Whether both models have the same most probable token."""

    def __len__(self) -> int:
        return len(self.loss)

    @staticmethod
    def joined(parts: Sequence["Scores"]) -> "Scores":
        """All of the parts, in order."""
        return Scores(
            *(
                np.concatenate([getattr(part, name) for part in parts])
                for name in ("loss", "base_loss", "divergence", "same_top")
            )
        )


def score(logits: Logits, targets: Sequence[int], base: Logits | None = None) -> Scores:
    """Score each row's target; `logits` and `base` are (len(targets), vocabulary).

    Raises `EdgeInferError` for logits that aren't finite.
    """
    parts = [
        _score_block(logits[block], targets[block], None if base is None else base[block])
        for block in row_blocks(*logits.shape)
    ]
    return Scores.joined(parts)


def _score_block(logits: Logits, targets: Sequence[int], base: Logits | None) -> Scores:
    for source in (logits, base):
        if source is not None and not np.isfinite(source).all():
            raise EdgeInferError("a model gave logits that aren't finite; there is nothing to compare")
    rows, target_ids = np.arange(len(targets)), np.asarray(targets)
    ours = log_softmax(logits)
    loss = -ours[rows, target_ids]
    if base is None:
        none = np.empty(0)
        return Scores(loss, none, none, np.empty(0, np.bool_))
    theirs = log_softmax(base)
    base_loss = -theirs[rows, target_ids]
    same_top = logits.argmax(axis=1) == base.argmax(axis=1)
    np.subtract(theirs, ours, out=ours)
    np.exp(theirs, out=theirs)
    divergence = np.einsum("ij,ij->i", theirs, ours)
    return Scores(loss, base_loss, divergence, same_top)


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
