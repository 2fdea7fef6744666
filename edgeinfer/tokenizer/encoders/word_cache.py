"""The tokens of words that were encoded before."""

from collections.abc import Callable

CACHED_WORDS = 100_000
LONGEST_WORD = 32
"""Characters; longer words rarely come again."""


class WordCache(dict[str, list[int]]):
    """word -> its tokens, computed by `ids_of` unless stored; when full, it starts again."""

    def __init__(self, ids_of: Callable[[str], list[int]]) -> None:
        super().__init__()
        self._ids_of = ids_of

    def __missing__(self, word: str) -> list[int]:
        ids = self._ids_of(word)
        if len(word) <= LONGEST_WORD:
            if len(self) >= CACHED_WORDS:
                self.clear()
            self[word] = ids
        return ids
