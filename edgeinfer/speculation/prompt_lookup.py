"""Prompt lookup: drafts the tokens that followed an earlier occurrence of the last tokens."""

from collections.abc import Hashable, Sequence

from edgeinfer.speculation.drafter import Draft, Drafter, DraftRequest, DraftText
from edgeinfer.speculation.lookup_index import LookupIndex

LONGEST, SHORTEST = 4, 2
"""Lengths of the n-gram at the end of the text that is searched for, in this order."""
FIRST_PROBS = {2: 0.2, 3: 0.4, 4: 0.7}
"""Initial probability that the token after an n-gram of this length follows again."""
MEMORY = 0.95
"""Weight of the previous estimate when one more draft token has been verified."""


class PromptLookup(Drafter):
    """An index of all n-grams of SHORTEST to LONGEST tokens in the text; `lookup_files`: lookup files.

    The longest n-gram is used, in the text before the lookup files, and there at its latest occurrence.
    Source: Saxena 2023, "Prompt lookup decoding".
    """

    name = "lookup"

    def __init__(self, lookup_files: Sequence[Sequence[int]] = ()) -> None:
        texts = [text for text in lookup_files if len(text) > SHORTEST]
        self._lookup_index = LookupIndex(texts, range(SHORTEST, LONGEST + 1)) if texts else None
        self._ends = _NgramIndex()
        self._text: list[int] = []
        self._source: Sequence[int] | None = None
        self._probs = dict(FIRST_PROBS)
        self._latest: tuple[int, int, tuple[int, ...]] | None = None
        self._others: dict[Hashable, PromptLookup] = {}
        """The indexes of texts that are decoded together."""

    @property
    def nbytes(self) -> int:
        return self._lookup_index.nbytes if self._lookup_index else 0

    def propose(self, history: Sequence[int], request: DraftRequest) -> Draft:
        """The tokens that followed the last occurrence of the longest n-gram at the end of `history`.

        The acceptance probability is learned for each n-gram length.
        """
        self._index(history)
        self._update_acceptance(history)
        for length in range(min(LONGEST, len(history)), SHORTEST - 1, -1):
            ids = self._following(history, length, max(LONGEST, request.max_tokens))
            if ids:
                self._latest = length, len(history), ids
                return Draft(ids[: self._worthwhile(length, request)])
        return Draft()

    def propose_each(self, texts: Sequence[DraftText]) -> list[Draft]:
        """As `propose`, with an index for each text."""
        return [self._for(text.key).propose(text.history, text.request) for text in texts]

    def _for(self, key: Hashable) -> "PromptLookup":
        if key not in self._others:
            self._others[key] = other = PromptLookup()
            other._lookup_index, other._probs = self._lookup_index, self._probs
        return self._others[key]

    def forget(self, key: Hashable) -> None:
        self._others.pop(key, None)

    def _following(self, history: Sequence[int], length: int, max_tokens: int) -> tuple[int, ...]:
        """The tokens that followed the last `length` tokens, at most `max_tokens`; empty if there is no
        occurrence.
        """
        end = self._ends.before(tuple(history[-length:]), len(history))
        if end is not None:
            return tuple(history[end : end + max_tokens])
        return self._lookup_index.following(history, length, max_tokens) if self._lookup_index else ()

    def _worthwhile(self, length: int, request: DraftRequest) -> int:
        """Number of tokens after an n-gram of this length that are likely enough to be reached."""
        reached = 1.0
        for count in range(request.max_tokens):
            reached *= self._probs[length]
            if reached < request.min_prob:
                return count
        return request.max_tokens

    def _update_acceptance(self, history: Sequence[int]) -> None:
        """Compare the last draft with the accepted tokens."""
        if self._latest is None:
            return
        length, start, ids = self._latest
        self._latest = None
        for drafted, actual in zip(ids, history[start : start + len(ids)], strict=False):
            self._probs[length] = MEMORY * self._probs[length] + (1 - MEMORY) * float(drafted == actual)
            if drafted != actual:
                break

    def _index(self, history: Sequence[int]) -> None:
        """Index the new tokens of the history; start again if the history has changed otherwise."""
        seen = len(self._text)
        # A stream's history only grows: comparing it at every token is unnecessary.
        grown = history is self._source and len(history) >= seen
        if not grown and list(history[:seen]) != self._text:
            self._ends, self._text, seen = _NgramIndex(), [], 0
            self._latest = None
        self._source = history
        self._ends.grow(history, seen)
        self._text += history[seen:]

    def close(self) -> None:
        self._text, self._source = [], None
        self._others.clear()


class _NgramIndex:
    """N-gram -> the end indices of its last two occurrences."""

    def __init__(self) -> None:
        self._last: dict[tuple[int, ...], tuple[int, int | None]] = {}

    def grow(self, text: Sequence[int], seen: int) -> None:
        """Add the n-grams of `text` that end after its first `seen` tokens."""
        for end in range(seen + 1, len(text) + 1):
            for length in range(SHORTEST, min(LONGEST, end) + 1):
                run = tuple(text[end - length : end])
                before = self._last.get(run)
                self._last[run] = end, before[0] if before else None

    def before(self, run: tuple[int, ...], position: int) -> int | None:
        """The end index of the n-gram's last occurrence before `position`."""
        ends = self._last.get(run)
        if ends is None:
            return None
        return ends[0] if ends[0] < position else ends[1]
