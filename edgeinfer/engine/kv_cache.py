"""What a KV cache holds: its tokens, which of them were evicted, and which positions have other owners."""

import sys
from bisect import bisect_left
from collections.abc import Callable, Sequence

from edgeinfer.engine.ring_positions import RingPositions
from edgeinfer_kernels.backend import PAGE

SLICES = (256, 16, 1)
"""Numbers of tokens compared at once; on a mismatch the next smaller one is used."""


class KVCache:
    """A cache for `context` tokens of `nbytes` bytes; `ids` are the tokens that it holds. `rings`: its rings,
    if it has any. `padding`: positions after its tokens that a step may write.
    """

    def __init__(
        self, context: int, nbytes: int = 0, rings: RingPositions | None = None, padding: int = 0
    ) -> None:
        self.context = context
        self.padding = padding
        self.nbytes = nbytes
        self.rings = rings if rings is not None and rings.shapes else None
        self.ids: list[int] = []
        self.shared = 0
        """Number of first positions that are pages of other owners too, so that they must not change."""
        self.reserved = sys.maxsize
        """Positions from `shared` up to here have no other owner."""
        self.make_room: Callable[[int], None] = _keep_room
        """Called to reserve the positions up to its argument."""
        self.evicted: list[tuple[int, int]] = []
        """(index in the whole text, token) of each evicted token before the end, rising."""
        self._compared: Sequence[int] = ()
        self._same = 0
        """The text that was compared last, and how many of its first tokens are those of `ids`."""

    @property
    def free(self) -> int:
        """Number of tokens that still fit."""
        return self.context - len(self.ids)

    def reserve(self, end: int) -> None:
        """Reserve the positions up to `end`, and those of padding, before they are written."""
        if end + self.padding > self.reserved:
            self.make_room(end + self.padding)

    def unshare(self, length: int) -> None:
        """Positions from `length` on are about to change."""
        if length < self.shared:
            self.shared = self.reserved = length // PAGE * PAGE

    def cached_prefix(self, text: Sequence[int]) -> int:
        """The number of first tokens of a text that are cached. The tokens of a text never change, it only
        grows: those that were found to be cached aren't compared again, however long the text is.
        """
        if text is not self._compared:
            self._compared, self._same = text, 0
        self._same += shared_prefix(self.ids[self._same :], text[self._same :])
        return self._same

    def append(self, ids: Sequence[int]) -> None:
        """Add these tokens; the backends have already appended their keys and values."""
        self.ids.extend(ids)
        if self.rings is not None:
            self.rings.extend(len(self.ids))

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
        self.cut(length)
        self.unshare(length)
        # A gap is kept while the cache holds a token after it.
        while self.evicted and self.evicted[-1][0] >= length + len(self.evicted) - 1:
            del self.evicted[-1]

    def cut(self, length: int) -> None:
        """Forget the tokens after the first `length`, which may be processed again."""
        del self.ids[length:]
        self._same = min(self._same, length)

    def evict(self, indices: Sequence[int]) -> None:
        """Record the eviction of the tokens at `indices` (rising indices in `ids`)."""
        gaps, dropped = {position for position, _ in self.evicted}, set(indices)
        positions = [position for position in range(len(self.ids) + len(gaps)) if position not in gaps]
        self.evicted += [(positions[at], self.ids[at]) for at in indices]
        self.evicted.sort()
        self.ids[:] = [token for at, token in enumerate(self.ids) if at not in dropped]
        self._same = min(self._same, indices[0])


def _keep_room(end: int) -> None:
    """All positions belong to one text."""


def shared_prefix(held: Sequence[int], ids: Sequence[int]) -> int:
    """The length of the common prefix of two sequences."""
    count, limit = 0, min(len(held), len(ids))
    if held[:limit] == ids[:limit]:
        return limit
    # One comparison per slice: this runs in every forward with a draft.
    for size in SLICES:
        while count + size <= limit and held[count : count + size] == ids[count : count + size]:
            count += size
    return count
