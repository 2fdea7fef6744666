"""The ids of the tokens that the backend's KV cache holds."""

from bisect import bisect_left
from collections.abc import Sequence

SLICES = (256, 16, 1)
"""Numbers of tokens compared at once; on a mismatch the next smaller one is used."""


class KVCache:
    """A cache for `context` tokens of `nbytes` bytes; `ids` are the tokens that it holds."""

    def __init__(self, context: int, nbytes: int = 0) -> None:
        self.context = context
        self.nbytes = nbytes
        self.ids: list[int] = []
        self.evicted: list[tuple[int, int]] = []
        """(index in the whole text, token) of each evicted token before the end, rising."""

    @property
    def free(self) -> int:
        """Number of tokens that still fit."""
        return self.context - len(self.ids)

    def append(self, ids: Sequence[int]) -> None:
        """Add these tokens; the backends have already appended their keys and values."""
        self.ids.extend(ids)

    @property
    def text(self) -> list[int]:
        """`ids` with all evicted tokens reinserted."""
        gaps, held = dict(self.evicted), iter(self.ids)
        return [gaps[at] if at in gaps else next(held) for at in range(len(self.ids) + len(gaps))]

    @property
    def first_evicted(self) -> int | None:
        """The number of first tokens that were processed before any eviction; None: no eviction."""
        return self.evicted[0][0] if self.evicted else None

    def cached_of(self, length: int) -> int:
        """Number of cached tokens among the first `length` tokens of the text."""
        return length - bisect_left(self.evicted, (length, -1))

    def rewind(self, length: int) -> None:
        """Truncate to the first `length` tokens; nothing is copied."""
        del self.ids[length:]
        # A gap is kept while the cache holds a token after it.
        while self.evicted and self.evicted[-1][0] >= length + len(self.evicted) - 1:
            del self.evicted[-1]

    def evict(self, indices: Sequence[int]) -> None:
        """Record the eviction of the tokens at `indices` (rising indices in `ids`)."""
        gaps, dropped = {position for position, _ in self.evicted}, set(indices)
        positions = [position for position in range(len(self.ids) + len(gaps)) if position not in gaps]
        self.evicted += [(positions[at], self.ids[at]) for at in indices]
        self.evicted.sort()
        self.ids[:] = [token for at, token in enumerate(self.ids) if at not in dropped]


def shared_prefix(held: Sequence[int], wanted: Sequence[int]) -> int:
    """The length of the common prefix of two sequences."""
    count, most = 0, min(len(held), len(wanted))
    if held[:most] == wanted[:most]:
        return most
    # One comparison per slice: this runs in every forward with a draft.
    for size in SLICES:
        while count + size <= most and held[count : count + size] == wanted[count : count + size]:
            count += size
    return count
