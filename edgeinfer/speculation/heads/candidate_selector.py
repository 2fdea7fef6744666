"""The selector of a block drafter (DFlash 2): the token before changes the scores of the best candidates."""

import numpy as np
import numpy.typing as npt

from edgeinfer.model_config.layers.block_drafts import Selector

Floats = npt.NDArray[np.float32]


class CandidateSelector:
    """The selector with these weights. `ids`: the token ids of the rows of the output; None: they are 0…

    The rows of candidates are read from the file, a few for each draft token.
    """

    def __init__(self, weights: Selector, ids: npt.NDArray[np.int64] | None) -> None:
        self._weights, self._ids = weights, ids
        self._hidden: Floats = np.ascontiguousarray(weights.hidden.decoded().T, np.float32)
        self._gates: Floats = np.empty((0, 0), np.float32)

    def begin(self, states: Floats) -> None:
        """Take the states of a block after the output norm, (rows, hidden_size)."""
        self._gates = states @ self._hidden

    def selected(self, row: int, logits: Floats, token: int) -> Floats:
        """(rows of the output,): the scores of the best candidates of a row after a token; -inf of others."""
        weights = self._weights
        best = np.argpartition(logits, -min(weights.count, len(logits)))[-weights.count :]
        ids = best if self._ids is None else self._ids[best]
        before = weights.predecessor.decoded_rows(np.array([token]))[0] * self._gates[row]
        scores = np.full_like(logits, -np.inf)
        scores[best] = logits[best] + weights.successor.decoded_rows(ids) @ before
        return scores
