"""The KV cache: keys and values of the processed tokens, and the ids of these tokens."""

from bisect import bisect_left
from collections.abc import Sequence

from edgeinfer_kernels.layer_cache import CacheType, LayerCache
from edgeinfer_kernels.specification import DecoderSpecification

STRETCHES = (256, 16, 1)
"""Numbers of tokens compared at once; on a mismatch the next smaller one is used."""


class KVCache:
    """A cache for `context` tokens; `ids` are the tokens that it holds.

    `layers` are the keys and values in main memory; a backend with the cache on its device reports their
    `device_bytes`.
    """

    def __init__(self, context: int, layers: Sequence[LayerCache] = (), device_bytes: int = 0) -> None:
        self.context = context
        self.layers = list(layers)
        self.ids: list[int] = []
        self.forgotten: list[tuple[int, int]] = []
        """(index in the whole text, token) of each evicted token before the end, rising."""
        self._device_bytes = device_bytes

    @classmethod
    def allocate(
        cls, specification: DecoderSpecification, context: int, kind: CacheType = "f16"
    ) -> "KVCache":
        """Allocate a cache in main memory."""
        return cls(
            context, [LayerCache.allocate(layer.attention, context, kind) for layer in specification.layers]
        )

    @staticmethod
    def nbytes_for(specification: DecoderSpecification, context: int, kind: CacheType) -> int:
        """Bytes of main memory for a cache of this size."""
        return sum(LayerCache.nbytes_for(layer.attention, context, kind) for layer in specification.layers)

    @property
    def nbytes(self) -> int:
        return self._device_bytes + sum(layer.nbytes for layer in self.layers)

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
        gaps, held = dict(self.forgotten), iter(self.ids)
        return [gaps[at] if at in gaps else next(held) for at in range(len(self.ids) + len(gaps))]

    @property
    def slid_at(self) -> int | None:
        """The number of first tokens that were processed before any eviction; None: no eviction."""
        return self.forgotten[0][0] if self.forgotten else None

    def held_of(self, length: int) -> int:
        """Number of cached tokens among the first `length` tokens of the text."""
        return length - bisect_left(self.forgotten, (length, -1))

    def rewind(self, length: int) -> None:
        """Truncate to the first `length` tokens; nothing is copied."""
        del self.ids[length:]
        # A gap is kept while the cache holds a token after it.
        while self.forgotten and self.forgotten[-1][0] >= length + len(self.forgotten) - 1:
            del self.forgotten[-1]

    def forget(self, gone: Sequence[int]) -> None:
        """Record the eviction of the tokens at `gone` (rising indices in `ids`)."""
        gaps, dropped = {place for place, _ in self.forgotten}, set(gone)
        places = [place for place in range(len(self.ids) + len(gaps)) if place not in gaps]
        self.forgotten += [(places[at], self.ids[at]) for at in gone]
        self.forgotten.sort()
        self.ids[:] = [token for at, token in enumerate(self.ids) if at not in dropped]


def shared_prefix(held: Sequence[int], wanted: Sequence[int]) -> int:
    """The length of the common prefix of two sequences."""
    count, most = 0, min(len(held), len(wanted))
    if held[:most] == wanted[:most]:
        return most
    # One comparison per slice: this runs in every forward with a draft.
    for stretch in STRETCHES:
        while count + stretch <= most and held[count : count + stretch] == wanted[count : count + stretch]:
            count += stretch
    return count
