"""Changes of an engine's cache between two steps: rewinding, eviction, snapshots."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeinfer.engine.guards import DEVICE_FAILURES
from edgeinfer.engine.kv_cache import KVCache
from edgeinfer.snapshots.snapshot_file import Snapshot
from edgeinfer_kernels.backend import Backend, HiddenStates


class CacheChanges:
    """The part of `NativeEngine` that changes its cache and computes no logits."""

    backend: Backend[Any]
    cache: KVCache
    batch: int

    def _steps(self, ids: Sequence[int], limit: int | None = None) -> Iterator[HiddenStates]:
        """Process `ids` in steps of at most `limit` tokens."""
        raise NotImplementedError

    def snapshot(self) -> Snapshot:
        """Keys and values of all cached tokens. Arrays in main memory are views; write them before the next
        step.
        """
        with DEVICE_FAILURES:
            arrays = self.backend.snapshot(len(self.cache.ids))
        rings = self.cache.rings
        return Snapshot(list(self.cache.ids), arrays if rings is None else [rings.description(), *arrays])

    def restore(self, snapshot: Snapshot, length: int) -> None:
        """Replace the cache content by the first `length` tokens of a snapshot.

        Raises:
            ValueError: it is from another cache, or longer than this one, or its rings don't hold what the
                next token needs (`reusable`).
        """
        if length > min(self.cache.context, len(snapshot.ids)):
            raise ValueError(
                f"{length} tokens of a snapshot of {len(snapshot.ids)}, room for {self.cache.context}"
            )
        if self.reusable(length, snapshot) != length:
            raise ValueError(f"the snapshot can't be rewound to {length} tokens")
        rings, arrays = self.cache.rings, snapshot.arrays
        self.cache.rewind(0)
        self.cache.reserve(length)
        with DEVICE_FAILURES:
            self.backend.restore(arrays if rings is None else arrays[1:], length)
        if rings is not None:
            rings.restore(arrays[0])
        self.cache.append(snapshot.ids[:length])
        if length < len(snapshot.ids):
            self._rewind(length)

    def reusable(self, length: int, snapshot: Snapshot | None = None) -> int:
        """As `Engine.reusable`."""
        rings = self.cache.rings
        if snapshot is not None:
            held = rings if rings is None else rings.of_snapshot(snapshot.arrays)
            return length if rings is None or (held is not None and held.can_rewind(length)) else 0
        if length == len(self.cache.ids):
            return length
        length = self.backend.reach(length)
        return length if rings is None or rings.can_rewind(length) else 0

    @property
    def text(self) -> list[int]:
        """The processed tokens, including all evicted ones."""
        return self.cache.text

    @property
    def first_evicted(self) -> int | None:
        """The number of first tokens that were processed before any eviction; None: no eviction."""
        return self.cache.first_evicted

    def cached_of(self, length: int) -> int:
        """Number of cached tokens among the first `length` tokens of `text`."""
        return self.cache.cached_of(length)

    def evict(self, indices: Sequence[int]) -> None:
        """Evict the tokens at `indices` (rising indices in `ids`); later ones move up. If rings then hold too
        few positions, the remaining tokens are processed again.
        """
        rings, end = self.cache.rings, len(self.cache.ids)
        self.cache.unshare(indices[0])
        self.cache.reserve(end)
        is_enough = rings is None or rings.evict(indices, end)
        if is_enough:
            with DEVICE_FAILURES:
                self.backend.evict(np.asarray(indices, np.int64), end)
        self.cache.evict(indices)
        if not is_enough:
            self._rewind(len(self.cache.ids))

    def attention_scores(self, count: int) -> npt.NDArray[np.float64]:
        """(cached tokens,): attention scores of each from the last `count` tokens, which are
        processed again.
        """
        ids = self.cache.ids
        start = max(0, len(ids) - min(count, self.batch))
        return self.backend.attention_scores(self.backend.embed(ids[start:]), start)

    def rewind(self, length: int) -> None:
        """Truncate the cache to the first `length` tokens. If the model's state can't be rewound that far,
        the last tokens before are processed again.
        """
        if length < len(self.cache.ids):
            self._rewind(length)

    def _rewind(self, length: int) -> None:
        """As `Backend.rewind`, then process what it dropped."""
        rings = self.cache.rings
        with DEVICE_FAILURES:
            kept = self.backend.rewind(length if rings is None else rings.rewind(length))
            if rings is not None and not rings.can_rewind(kept):
                kept = self.backend.rewind(rings.rewind(kept))
        self.cache.rewind(length)
        dropped = self.cache.ids[kept:]
        if dropped:
            self._process_again(dropped)

    def _process_again(self, dropped: Sequence[int]) -> None:
        """Process the last tokens of the cache again."""
        self.cache.cut(len(self.cache.ids) - len(dropped))
        try:
            for _ in self._steps(dropped):
                pass
        except BaseException:
            self.cache.rewind(len(self.cache.ids))
            raise
