"""An engine and its snapshots on the disk: what saves reading is brought back, what took reading is kept."""

from edgeinfer.engine.protocols import Engine
from edgeinfer.generation.context_shift import ShiftingEngine
from edgeinfer.snapshots.store import SnapshotStore

WORTH_TOKENS = 64
"""Fewer tokens than these are read again sooner than a file is."""


class EngineSnapshots:
    """Recalls and keeps what one engine holds."""

    def __init__(self, engine: Engine, store: SnapshotStore) -> None:
        self._engine = engine
        self._store = store

    def recall(self, ids: list[int], held: int) -> int:
        """Bring back the longest beginning of `ids` that was kept, if it is longer by enough than the `held`
        tokens of them that the engine holds. How many tokens of them it holds now.
        """
        found = self._store.longest(ids, held + WORTH_TOKENS - 1)
        if found is None:
            return held
        snapshot, length = found
        try:
            self._engine.restore(snapshot, length)
        except (ValueError, OSError):
            # Of a cache that was laid out in another way: what the engine held may be gone too.
            self._engine.rewind(0)
            return 0
        return length

    def keep(self, owner: str | None = None) -> bool:
        """Write what the engine holds, for `owner`; whether it is on the disk now. Keys and values of a text
        that slid aren't those of its rest read by itself: they are kept for none.
        """
        slid = isinstance(self._engine, ShiftingEngine) and self._engine.slid_at is not None
        if slid or len(self._engine.ids) < WORTH_TOKENS:
            return False
        snapshot = self._engine.snapshot()
        return snapshot is not None and self._store.keep(snapshot, owner)
