"""Snapshots in main memory: texts that an engine no longer holds."""

from collections.abc import Sequence

import numpy as np

from edgeinfer.engine.native_engine import shared_prefix
from edgeinfer.snapshots.snapshot_file import Snapshot


class MemoryStore:
    """The last `count` snapshots that were kept or restored."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._snapshots: list[Snapshot] = []

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
        """Copy a snapshot, whose arrays may be views of the cache; those of its prefixes are dropped."""
        if any(held.ids[: len(snapshot.ids)] == snapshot.ids for held in self._snapshots):
            return True
        kept = [held for held in self._snapshots if snapshot.ids[: len(held.ids)] != held.ids]
        copied = Snapshot(snapshot.ids, [np.array(array) for array in snapshot.arrays])
        self._snapshots = [*kept, copied][-self._count :]
        return True
