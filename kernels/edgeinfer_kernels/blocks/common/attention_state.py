"""The KV cache of an attention block in main memory."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.caches.cache_formats import hadamard_rows
from edgeinfer_kernels.caches.cache_state import CacheState
from edgeinfer_kernels.caches.layer_cache import LayerCache

if TYPE_CHECKING:
    from edgeinfer_kernels.blocks.attention import AttentionSpec


@dataclass(frozen=True)
class AttentionState(CacheState):
    """The KV cache of one attention block, in main memory."""

    spec: "AttentionSpec"
    cache: LayerCache

    def keys(self, end: int) -> npt.NDArray[np.float32]:
        return self.rotated(0, end).astype(np.float32)

    def in_key_basis(self, queries: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        return hadamard_rows(queries) if self.cache.key_type == "q4_0" else queries

    def rotated(self, first: int, last: int) -> npt.NDArray[np.floating]:
        return self.cache.read_keys(first, last, self.spec.head_dim)

    def store_rotated(self, first: int, keys: npt.NDArray[np.floating]) -> None:
        self.cache.write_keys(first, keys.swapaxes(0, 1))
