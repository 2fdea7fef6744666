"""The keys and values of the tokens read so far, and which tokens these are."""

from bisect import bisect_left
from collections.abc import Sequence

from edgeinfer_kernels.layer_cache import CacheType, LayerCache
from edgeinfer_kernels.specification import DecoderSpecification

STRETCHES = (256, 16, 1)
"""Tokens that are compared at once: as long as they agree so many, then fewer."""


class KVCache:
    """Room for `context` tokens; `ids` are the tokens that it holds.

    `layers` are the keys and values where they lie in main memory; a backend that has them on its own device
    gives their `device_bytes`.
    """

    def __init__(self, context: int, layers: Sequence[LayerCache] = (), device_bytes: int = 0) -> None:
        self.context = context
        self.layers = list(layers)
        self.ids: list[int] = []
        self.forgotten: list[tuple[int, int]] = []
        """(place in the whole text, token) of those in the middle that have been given up, rising."""
        self._device_bytes = device_bytes

    @classmethod
    def allocate(
        cls, specification: DecoderSpecification, context: int, kind: CacheType = "f16"
    ) -> "KVCache":
        """A cache in main memory."""
        return cls(
            context, [LayerCache.allocate(layer.attention, context, kind) for layer in specification.layers]
        )

    @staticmethod
    def nbytes_for(specification: DecoderSpecification, context: int, kind: CacheType) -> int:
        """Bytes that a cache of this size takes in main memory."""
        return sum(LayerCache.nbytes_for(layer.attention, context, kind) for layer in specification.layers)

    @property
    def nbytes(self) -> int:
        return self._device_bytes + sum(layer.nbytes for layer in self.layers)

    @property
    def free(self) -> int:
        """Tokens that still fit."""
        return self.context - len(self.ids)

    def append(self, ids: Sequence[int]) -> None:
        """The backends have written these tokens' keys and values behind those before."""
        self.ids.extend(ids)

    @property
    def text(self) -> list[int]:
        """`ids` with all that has been forgotten between them."""
        gaps, held = dict(self.forgotten), iter(self.ids)
        return [gaps[at] if at in gaps else next(held) for at in range(len(self.ids) + len(gaps))]

    @property
    def slid_at(self) -> int | None:
        """So many first tokens were read with all before them in place; None: all were."""
        return self.forgotten[0][0] if self.forgotten else None

    def held_of(self, length: int) -> int:
        """How many tokens it holds of the first `length` of its text."""
        return length - bisect_left(self.forgotten, (length, -1))

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` tokens; nothing is copied."""
        del self.ids[length:]
        # A gap is there as long as a token behind it is.
        while self.forgotten and self.forgotten[-1][0] >= length + len(self.forgotten) - 1:
            del self.forgotten[-1]

    def forget(self, gone: Sequence[int]) -> None:
        """The keys and values of tokens at `gone` (rising places in `ids`) have been given up."""
        gaps, dropped = {place for place, _ in self.forgotten}, set(gone)
        places = [place for place in range(len(self.ids) + len(gaps)) if place not in gaps]
        self.forgotten += [(places[at], self.ids[at]) for at in gone]
        self.forgotten.sort()
        self.ids[:] = [token for at, token in enumerate(self.ids) if at not in dropped]


def shared_prefix(held: Sequence[int], wanted: Sequence[int]) -> int:
    """How many first tokens two sequences have in common."""
    count, most = 0, min(len(held), len(wanted))
    if held[:most] == wanted[:most]:
        return most
    # Stretches are compared by one call each: this is asked for every pass with a draft.
    for stretch in STRETCHES:
        while count + stretch <= most and held[count : count + stretch] == wanted[count : count + stretch]:
            count += stretch
    return count
