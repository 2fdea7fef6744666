"""The prompt cache of one engine: restores and saves its KV cache if that saves time."""

from collections.abc import Sequence
from typing import Protocol

from edgeinfer.engine.protocols import Engine
from edgeinfer.snapshots.snapshot_file import Snapshot

MIN_SNAPSHOT_TOKENS = 64
"""Minimum number of tokens: fewer are prefilled faster than a file is read."""


class Store(Protocol):
    """Snapshots of one model, on disk or in main memory."""

    def longest(self, ids: Sequence[int], more_than: int = 0) -> tuple[Snapshot, int] | None:
        """The snapshot with the longest common prefix with `ids`, and its length: more than `more_than`
        tokens.
        """
        ...

    def keep(self, snapshot: Snapshot, owner: str | None = None) -> bool:
        """Store a snapshot; returns whether it is stored."""
        ...


class EngineSnapshots:
    """Restores and saves the KV cache of one engine."""

    def __init__(self, engine: Engine, store: Store) -> None:
        self._engine = engine
        self._store = store

    def restore(self, ids: list[int], held: int) -> int:
        """Restore the longest saved prefix of `ids`, if it is enough longer than the `held` tokens already in
        the KV cache. Returns the number of tokens of `ids` in the KV cache.
        """
        longest = self._store.longest(ids, held + MIN_SNAPSHOT_TOKENS - 1)
        if longest is None:
            return held
        snapshot, length = longest
        if not self._engine.reusable(length, snapshot):
            return held
        try:
            self._engine.restore(snapshot, length)
        except (ValueError, OSError):
            # The snapshot has another memory layout; the tokens in the KV cache may be lost too.
            self._engine.rewind(0)
            return 0
        return length

    def keep(self, owner: str | None = None) -> bool:
        """Save the KV cache for `owner`; returns whether it is on disk. After a context shift nothing is
        saved, because the keys and values differ from those of the remaining text.
        """
        if self._engine.first_evicted is not None or len(self._engine.ids) < MIN_SNAPSHOT_TOKENS:
            return False
        snapshot = self._engine.snapshot()
        return snapshot is not None and self._store.keep(snapshot, owner)
