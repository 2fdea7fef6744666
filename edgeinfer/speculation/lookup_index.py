"""An index of token n-grams in constant texts: sorted arrays, searched in microseconds."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

MAX_OCCURRENCES = 8
"""Maximum number of occurrences of an n-gram that are compared; the last ones."""
MAX_COMPARED_TOKENS = 32
"""Maximum number of tokens before an occurrence that are compared with the end of the text."""
MULTIPLIER = 0x9E3779B97F4A7C15
"""Source: Knuth, The Art of Computer Programming 3, section 6.4: 2^64 over the golden ratio, made odd."""


class LookupIndex:
    """All n-grams of some lengths in `texts`; 12 bytes per token and length, and 4 per token."""

    def __init__(self, texts: Sequence[Sequence[int]], lengths: Sequence[int]) -> None:
        self._tokens = np.array([token for text in texts for token in text], np.int32)
        self._limits = np.cumsum([len(text) for text in texts], dtype=np.int64)
        self._sorted = {length: self._sorted_runs(length) for length in lengths}

    @property
    def nbytes(self) -> int:
        held = sum(keys.nbytes + ends.nbytes for keys, ends in self._sorted.values())
        return self._tokens.nbytes + held

    def following(self, text: Sequence[int], length: int, max_tokens: int) -> tuple[int, ...]:
        """The tokens after an occurrence of the last `length` tokens of `text`, at most `max_tokens`.

        Of several occurrences the one with the longest match before it is used, and of these the last.
        """
        keys, ends = self._sorted[length]
        key = _key(text[-length:])
        stop = int(np.searchsorted(keys, key, side="right"))
        best, longest = -1, 0
        for end in ends[max(0, stop - MAX_OCCURRENCES) : stop][::-1]:
            agreeing = self._matching_length(text, int(end))
            if agreeing > longest:
                best, longest = int(end), agreeing
        if longest < length:  # no occurrence, or another n-gram with the same key
            return ()
        limit = int(self._limits[np.searchsorted(self._limits, best)])
        return tuple(map(int, self._tokens[best : min(best + max_tokens, limit)]))

    def _sorted_runs(self, length: int) -> tuple[npt.NDArray[np.uint64], npt.NDArray[np.int32]]:
        """Keys of all n-grams, rising, and the end index of each; n-grams across two texts are excluded."""
        count = len(self._tokens) - length + 1
        if count < 1:
            return np.empty(0, np.uint64), np.empty(0, np.int32)
        keys = np.zeros(count, np.uint64)
        for position in range(length):
            keys = (keys + self._tokens[position : position + count].astype(np.uint64)) * np.uint64(
                MULTIPLIER
            )
        ends = np.arange(length, len(self._tokens) + 1, dtype=np.int32)
        texts = np.searchsorted(self._limits, [ends - length, ends - 1], side="right")
        within = texts[0] == texts[1]
        keys, ends = keys[within], ends[within]
        order = np.argsort(keys, kind="stable")
        return keys[order], ends[order]

    def _matching_length(self, text: Sequence[int], end: int) -> int:
        """Number of tokens before `end` that match the last ones of `text`, at most MAX_COMPARED_TOKENS."""
        max_tokens = min(MAX_COMPARED_TOKENS, len(text), end)
        for count in range(max_tokens):
            if int(self._tokens[end - 1 - count]) != text[-1 - count]:
                return count
        return max_tokens


def _key(run: Sequence[int]) -> np.uint64:
    key = 0
    for token in run:
        key = (key + token) * MULTIPLIER % (1 << 64)
    return np.uint64(key)
