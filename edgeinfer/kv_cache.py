"""The keys and values of the tokens read so far, and which tokens these are."""

from collections.abc import Sequence

from edgeinfer_kernels.backend import CacheType, LayerCache
from edgeinfer_kernels.specification import DecoderSpecification


class KVCache:
    """Preallocated for `context` tokens; `ids` are the tokens that it holds."""

    def __init__(self, specification: DecoderSpecification, context: int, kind: CacheType = "f16") -> None:
        self.context = context
        self.kind = kind
        self.ids: list[int] = []
        self.layers = [LayerCache.allocate(layer.attention, context, kind) for layer in specification.layers]

    @staticmethod
    def nbytes_for(specification: DecoderSpecification, context: int, kind: CacheType) -> int:
        """Bytes that a cache of this size takes."""
        return sum(LayerCache.nbytes_for(layer.attention, context, kind) for layer in specification.layers)

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers)

    @property
    def free(self) -> int:
        """Tokens that still fit."""
        return self.context - len(self.ids)

    def append(self, ids: Sequence[int]) -> None:
        """The backends have written these tokens' keys and values behind those before."""
        self.ids.extend(ids)

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` tokens; nothing is copied."""
        del self.ids[length:]
