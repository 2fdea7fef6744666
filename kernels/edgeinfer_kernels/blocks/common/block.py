"""What all block kinds have in common: specification, weights and state."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.blocks.common.block_sizes import BlockSizes, NormLengths
from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.matrix import Matrix, Vector
from edgeinfer_kernels.recurrent_state import RecurrentShape


@dataclass(frozen=True)
class NormSpec:
    """x / √(mean x² + ε) (rms) or (x - mean) / √(variance + ε) (layer), times weight, plus bias if given.

    `has_weights` False: the file has no weights of the norms around blocks; they are 1.
    """

    kind: Literal["rms", "layer"]
    epsilon: float
    has_weights: bool = True


class TensorReader(Protocol):
    """Reads the tensors of one layer by their GGUF names without the layer's prefix; checks shapes.

    All methods raise an error that names the tensor.
    """

    @property
    def hidden_size(self) -> int: ...

    def matrix(self, name: str, rows: int, columns: int) -> Matrix:
        """The tensor `name`.weight of (rows, columns)."""
        ...

    def matrix_or_none(self, name: str, rows: int, columns: int) -> Matrix | None:
        """As `matrix`; None if the file has no such tensor."""
        ...

    def alternating(self, names: Sequence[str], rows: int, columns: int, run: int) -> Matrix:
        """The tensors `names`, each of (rows, columns), as one matrix: `run` rows of each in turn."""
        ...

    def scaled_matrix(self, name: str, rows: int, factors: Vector) -> Matrix:
        """The tensor `name`.weight in float32 with a factor for each column."""
        ...

    def experts(self, name: str, count: int, rows: int, columns: int) -> Matrix:
        """The tensor `name`.weight of (count, rows, columns)."""
        ...

    def expert_pairs(self, name: str, count: int, rows: int, columns: int) -> tuple[Matrix, Matrix] | None:
        """The first and the last `rows` of each expert of `name`.weight; None if there is no such tensor."""
        ...

    def has_shape(self, name: str, rows: int, columns: int) -> bool:
        """Whether there is a tensor `name`.weight of (rows, columns)."""
        ...

    def vector(self, name: str, length: int) -> Vector | None:
        """The tensor `name` with this number of elements in float32; None if the file has none."""
        ...

    def required(self, name: str, length: int) -> Vector:
        """As `vector`, for a tensor that must exist."""
        ...

    def nonzero(self, name: str, length: int) -> Vector:
        """As `required`, for a tensor without zeros."""
        ...

    def model_vector(self, name: str, length: int) -> Vector:
        """As `required`, for a tensor outside the layers."""
        ...

    def model_vector_or_none(self, name: str, length: int) -> Vector | None:
        """As `vector`, for a tensor outside the layers."""
        ...

    def model_matrix(self, name: str, rows: int, columns: int) -> Matrix:
        """As `matrix`, for a tensor outside the layers."""
        ...

    def model_experts(self, name: str, count: int, rows: int, columns: int) -> Matrix:
        """As `experts`, for a tensor outside the layers."""
        ...


class BlockWeights(Protocol):
    """The weights of one block. Implementations derive from this class."""

    kind: ClassVar[str]

    def matrices(self) -> list[Matrix]:
        """Every matrix; the stacked matrices of experts once."""
        ...

    def granule_matrices(self) -> list[Matrix]:
        """The matrices of the block's neurons or experts; the default, for blocks of one kind of unit and for
        those that aren't divisible, is all of them.
        """
        return self.matrices()


class BlockState(Protocol):
    """What a block keeps of earlier tokens, in main memory."""

    @property
    def nbytes(self) -> int: ...

    def views(self, end: int, slots: Any = ()) -> tuple[npt.NDArray[np.generic], ...]:
        """Views of the arrays that hold the first `end` positions; of a recurrent state these `slots`."""
        ...

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy `count` positions; the ranges must not overlap."""
        ...

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy pages of 16 positions; all sources are read before a target is written."""
        ...

    def pages(self) -> list[npt.NDArray[np.generic]]:
        """Views (heads, pages, …) of the arrays."""
        ...

    def evict(self, positions: npt.NDArray[np.int64], end: int) -> None:
        """Evict `positions` (ascending) and compact the others up to `end`."""
        ...

    def pooled(self, count: int) -> "tuple[BlockState, Sequence[BlockState]]":
        """`count` zeroed states like this one in common arrays: all as one state, and each."""
        ...


class BlockSpec(Protocol):
    """What a block computes. Specifications are frozen and compare by value."""

    kind: ClassVar[str]
    """The module name of the kind in `blocks` and in each backend's `blocks`."""
    is_divisible: ClassVar[bool]
    """Whether the block consists of units (neurons or experts) that can be on different devices."""

    @property
    def head_shape(self) -> tuple[int, ...]:
        """The sizes of heads, for which a GPU's kernels are tuned; empty without heads."""
        ...

    @property
    def recurrent(self) -> RecurrentShape | None:
        """The sizes of a recurrent state; None: the state isn't recurrent. See `recurrent_state.py`."""
        ...

    @property
    def source_layer(self) -> int | None:
        """The layer whose block of this kind has the state that the block reads; None: its own layer."""
        ...

    def read(self, tensors: TensorReader) -> BlockWeights:
        """Read the block's weights."""
        ...

    def sizes(self, weights: Any, norms: NormLengths) -> BlockSizes:
        """The sizes of the block's weights with its norms."""
        ...

    def state_nbytes(self, context: int, cache_type: CacheType) -> int:
        """Bytes of the state in main memory."""
        ...

    def allocate_state(self, context: int, cache_type: CacheType) -> BlockState | None:
        """The zeroed state for `context` tokens; None: the block keeps none."""
        ...


class StatelessSpec:
    """Base of the specifications of blocks without heads and state."""

    head_shape: ClassVar[tuple[int, ...]] = ()
    recurrent: ClassVar[None] = None
    source_layer: ClassVar[None] = None

    def state_nbytes(self, context: int, cache_type: CacheType) -> int:
        return 0

    def allocate_state(self, context: int, cache_type: CacheType) -> None:
        return None
