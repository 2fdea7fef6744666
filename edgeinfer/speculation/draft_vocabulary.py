"""Decides from how many rows of its output a draft head drafts: from all, or from the first ones.

In vocabularies of byte pairs a low id is an early merge, so the first rows are those of frequent tokens. A
draft of these rows costs less, and can't have the other tokens. Source: Zhao et al. 2025, "FR-Spec"
(arXiv:2502.14856), which ranks tokens by their frequency in a corpus. Whether the ids of a vocabulary are in
this order isn't assumed but seen: in the share of the text's last tokens that are among the first rows.
"""

from collections.abc import Sequence

import numpy as np

from edgeinfer.speculation.draft_controller import DraftController
from edgeinfer_kernels.draft_loop import DRAFT_ROWS

MIN_VOCABULARY, MIN_SHORT = 1 << 16, 1 << 15
"""Vocabularies below the first have no short one, and none has fewer ids than the second."""
SHORT_SHARE = 0.25
MAX_SHARE_OF_ROWS = 0.75
"""A larger part of a head's rows costs about as much as all of them."""
RECENT, MEMORY = 96, 0.96
"""Last tokens of a text that are counted, and the weight of each relative to the one after it."""
PRIOR = 0.2
"""Assumed tokens that are there, and as many that aren't, before any of the text is seen."""
DECIDED_TOKENS = 8
"""Tokens of a text after which the size is decided again."""


def short_vocabulary(vocabulary: int, rows: int) -> int:
    """How many first ids a short draft has, of a head with `rows` rows for a model with this vocabulary; 0:
    it has no short ones.
    """
    groups = -int(-SHORT_SHARE * vocabulary // DRAFT_ROWS)
    size = max(MIN_SHORT, groups * DRAFT_ROWS)
    return size if vocabulary >= MIN_VOCABULARY and size <= MAX_SHARE_OF_ROWS * rows else 0


def short_note(name: str, size: int) -> str:
    """The message for the user about the short vocabulary of a drafter."""
    return f"{name}: it drafts the first {size:,} token ids where that is faster"


def coverage(history: Sequence[int], size: int) -> float:
    """The expected share of tokens below `size` after a text, by its last tokens."""
    ids = np.array(history[-RECENT:])[::-1]
    weights = MEMORY ** np.arange(len(ids))
    return float((weights[ids < size].sum() + PRIOR) / (weights.sum() + 2 * PRIOR))


class DraftVocabulary:
    """The decisions for one kind of completion. `size`: of the short vocabulary, 0: there is none."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._decided_at, self._last = 0, -1
        """The length of the text that was decided for, and its last token."""

    def choose(self, history: Sequence[int], controller: DraftController) -> int:
        """How many first ids to draft from after a text; 0: all. The controller has the costs of both."""
        if not self.size:
            return 0
        if not self._is_decided(history):
            controller.choose_vocabulary(coverage(history, self.size))
            self._decided_at, self._last = len(history), history[-1]
        return self.size if controller.costs.is_short else 0

    def _is_decided(self, history: Sequence[int]) -> bool:
        """Whether the text continues the one that was decided for by a few tokens."""
        at = self._decided_at
        return 0 < at <= len(history) < at + DECIDED_TOKENS and history[at - 1] == self._last

    def misses(self, token: int, controller: DraftController) -> bool:
        """Whether a token couldn't be drafted, as the vocabulary in use is too short."""
        return controller.costs.is_short and token >= self.size
