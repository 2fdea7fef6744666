"""The protocol of a backend: blocks of a layer on the activations of some tokens, and their cache."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.specification import AttentionSpecification

LANES = 16
CacheType = Literal["f16", "f32"]
Activations = npt.NDArray[np.float32]


def padded(count: int) -> int:
    """`count` rounded up to whole lanes."""
    return -(-count // LANES) * LANES


@dataclass(frozen=True)
class LayerCache:
    """One layer's keys and values: (kv_heads, context, head_dim rounded up to 16) each."""

    keys: npt.NDArray[np.floating]
    values: npt.NDArray[np.floating]

    @staticmethod
    def nbytes_for(specification: AttentionSpecification, context: int, kind: CacheType) -> int:
        """Bytes that `allocate` will take."""
        elements = specification.kv_heads * context * padded(specification.head_dim)
        return 2 * elements * (2 if kind == "f16" else 4)

    @classmethod
    def allocate(cls, specification: AttentionSpecification, context: int, kind: CacheType) -> "LayerCache":
        shape = (specification.kv_heads, context, padded(specification.head_dim))
        dtype = np.float16 if kind == "f16" else np.float32
        return cls(np.zeros(shape, dtype), np.zeros(shape, dtype))

    @property
    def nbytes(self) -> int:
        return self.keys.nbytes + self.values.nbytes


class Backend(Protocol):
    """A decoder's layers, loaded; x is (tokens, width) float32, the backend's until the next `embed`."""

    name: str

    def embed(self, ids: Sequence[int]) -> Activations:
        """Scaled embeddings of at most `batch` tokens."""
        ...

    def attention_block(self, layer: int, x: Activations, start: int) -> None:
        """x += attention, for tokens at positions start…; their keys and values go to the layer's cache."""
        ...

    def feed_forward_block(self, layer: int, x: Activations) -> None:
        """x += feed-forward."""
        ...

    def logits(self, x: Activations) -> npt.NDArray[np.float32]:
        """(tokens, vocabulary) float32 of the rows of x; a fresh array."""
        ...

    def close(self) -> None:
        """Give back threads and memory."""
        ...
