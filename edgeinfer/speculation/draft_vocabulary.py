"""Decides from how many rows of its output a draft head drafts: from all, or from the first ones.

In vocabularies of byte pairs a low id is an early merge, so the first rows are those of frequent tokens. A
draft of these rows costs less, and can't have the other tokens. Source: Zhao et al. 2025, "FR-Spec"
(arXiv:2502.14856), which ranks tokens by their frequency in a corpus. Whether the ids of a vocabulary are in
this order isn't assumed but seen: in the share of the last generated tokens that are among the first rows.
"""

from collections.abc import Sequence

from edgeinfer.speculation.draft_controller import DraftController
from edgeinfer.speculation.last_text import LastText
from edgeinfer_kernels.draft_loop import DRAFT_ROWS

MIN_VOCABULARY, MIN_SHORT = 1 << 16, 1 << 15
"""Vocabularies below the first have no short one, and none has fewer ids than the second."""
SHORT_SHARE = 0.25
MAX_SHARE_OF_ROWS = 0.75
"""A larger part of a head's rows costs about as much as all of them."""
RECENT, MEMORY = 96, 0.96
"""Maximum number of tokens that are counted at once, and the weight of each relative to the one after it."""
PRIOR = 0.5
"""Assumed tokens that are there, and as many that aren't, before any is seen."""
DECIDED_TOKENS = 8
"""Tokens after which the size is decided again."""


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


class DraftVocabulary:
    """The decisions for one kind of completion. `size`: of the short vocabulary, 0: there is none."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._covered = self._counted = 0.0
        self._undecided = 0
        """Number of tokens that were counted since the last decision."""
        self._seen = LastText()

    @property
    def coverage(self) -> float:
        """The expected share of tokens below `size`."""
        return (self._covered + PRIOR) / (self._counted + 2 * PRIOR)

    def choose(self, history: Sequence[int], controller: DraftController) -> int:
        """How many first ids to draft from after a text; 0: all. The controller has the costs of both."""
        if not self.size:
            return 0
        self._count(history)
        if self._undecided >= DECIDED_TOKENS:
            controller.choose_vocabulary(self.coverage)
            self._undecided = 0
        return self.size if controller.costs.is_short else 0

    def _count(self, history: Sequence[int]) -> None:
        """Count the tokens since the last call if the text continues that one. A prompt says nothing about
        the tokens that the model generates.
        """
        count = min(self._seen.following(history) or 0, RECENT)
        for token in history[len(history) - count :]:
            self._covered = MEMORY * self._covered + (token < self.size)
            self._counted = MEMORY * self._counted + 1
            self._undecided += 1

    def misses(self, token: int, controller: DraftController) -> bool:
        """Whether a token couldn't be drafted, as the vocabulary in use is too short."""
        return controller.costs.is_short and token >= self.size
