"""Snapshots in main memory: texts that an engine no longer holds."""

from collections.abc import Sequence

import numpy as np

from edgeinfer.engine.kv_cache import shared_prefix
from edgeinfer.snapshots.snapshot_file import Snapshot


class MemoryStore:
    """Snapshots of at most `limit_bytes`; those that were kept or restored least recently are dropped."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._snapshots: list[Snapshot] = []

    @property
    def nbytes(self) -> int:
        """Bytes of all snapshots."""
        return sum(snapshot.nbytes for snapshot in self._snapshots)

    def longest(self, ids: Sequence[int], more_than: int = 0) -> tuple[Snapshot, int] | None:
        """The snapshot with the longest common prefix with `ids`, and its length: more than `more_than`."""
        lengths = [shared_prefix(snapshot.ids, ids) for snapshot in self._snapshots]
        if max(lengths, default=0) <= more_than:
            return None
        index = lengths.index(max(lengths))
        found = self._snapshots.pop(index)
        self._snapshots.append(found)
        return found, lengths[index]

    def keep(self, snapshot: Snapshot, owner: str | None = None) -> bool:
        """Copy a snapshot, whose arrays may be views of the cache; those of its prefixes are dropped. False:
        it is larger than all that may be kept.
        """
        if any(held.ids[: len(snapshot.ids)] == snapshot.ids for held in self._snapshots):
            return True
        if snapshot.nbytes > self._limit:
            return False
        self._snapshots = [held for held in self._snapshots if snapshot.ids[: len(held.ids)] != held.ids]
        while self.nbytes + snapshot.nbytes > self._limit:
            del self._snapshots[0]
        self._snapshots.append(Snapshot(snapshot.ids, [np.array(array) for array in snapshot.arrays]))
        return True
