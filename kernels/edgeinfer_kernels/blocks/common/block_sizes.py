"""The sizes of a block: its matrices, vectors and buffers, on the CPU and on a GPU, without the weights."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Self

from edgeinfer_kernels.blocks.common.rope import RopeSpec
from edgeinfer_kernels.caches.cache_types import CacheType
from edgeinfer_kernels.caches.layer_cache import pool_positions
from edgeinfer_kernels.matrix import MatrixSize


class NormLengths(NamedTuple):
    """The vectors of the norms around a block: their lengths, and whether one of them follows the block.

    `is_shared`: another block reads the result of the norm before the block. `is_followed`: the layer has a
    block after it. `is_own`: the block shares the input of the one before it, but not its norm.
    """

    vectors: tuple[int, ...] = ()
    has_post_norm: bool = False
    is_shared: bool = False
    is_followed: bool = False
    is_own: bool = False


NO_NORMS = NormLengths()


class StepShape(NamedTuple):
    """What determines the buffers of a decode step on a GPU besides the blocks themselves.

    `input_floats`: a matrix that reads normed hidden states is in a float format; `hidden_floats`: one that
    reads the hidden rows of a feed-forward is.
    """

    tokens: int
    hidden_size: int
    input_floats: bool
    hidden_floats: bool


class ChunkRows(NamedTuple):
    """Elements of the buffers that all blocks share for a chunk of a prompt on a GPU: hidden rows, their
    scales, and results of matmuls.
    """

    hidden: int = 0
    scales: int = 0
    products: int = 0


@dataclass(frozen=True)
class BlockSizes:
    """Matrices, vectors and state of a block, without weights. The defaults are those of a block without
    state that is never divided between devices.
    """

    label: ClassVar[str]
    """The block's name in plans."""
    state_label: ClassVar[str] = ""
    is_divisible: ClassVar[bool] = False
    """Whether the block consists of units (neurons or experts) that can be on different devices."""
    reads_other_layers: ClassVar[bool] = False
    """Whether it reads other layers' results: all blocks but divisible ones have to be on one device."""
    has_own_norm: ClassVar[bool] = False
    """Whether it shares its input with the block before it, but not the norm."""
    needs_whole_model: ClassVar[bool] = False
    """Whether the model can't be split between devices."""
    has_device_kernels: ClassVar[bool] = True
    """Whether it runs on a GPU."""

    def matrices(self) -> Iterator[MatrixSize]:
        """Every matrix that a token may be multiplied with; that of each expert once."""
        yield from self.undivided()

    def undivided(self) -> list[MatrixSize]:
        """The matrices that every token reads and that stay together."""
        raise NotImplementedError

    def undivided_device_bytes(self) -> int:
        """Bytes on a GPU of the undivided part with its vectors. Raises `UnsupportedOnDeviceError`."""
        raise NotImplementedError

    def state_name(self, context: int) -> str:
        """The name of the state for this context in plans."""
        return self.state_label

    def state_bytes(self, context: int, cache_type: CacheType) -> int:
        """Bytes of the state in main memory."""
        return 0

    def state_device_bytes(self, context: int, cache_type: CacheType) -> int:
        """Bytes of the state on a GPU."""
        return 0

    def states_device_bytes(self, context: int, sequences: int, cache_type: CacheType) -> int:
        """Bytes of the states of some sequences on a GPU, each of `context` tokens."""
        return self.state_device_bytes(pool_positions(context, sequences), cache_type)

    def with_whole_cache(self) -> "BlockSizes":
        """The same block with a cache of all positions, if it had a ring."""
        return self

    def has_device_pages(self, context: int) -> bool:
        """Whether a GPU can hold the states of several sequences: in pages of a cache that they share, which
        holds `context` tokens, or one after the other.
        """
        return not self.state_label

    def read_state_bytes(self, context: int, cache_type: CacheType) -> int:
        """Bytes in main memory of the state that the block reads, maybe that of another layer."""
        return self.state_bytes(context, cache_type)

    def read_state_device_bytes(self, context: int, cache_type: CacheType) -> int:
        """As `read_state_bytes`, on a GPU."""
        return self.state_device_bytes(context, cache_type)

    def state_share(self, depth: int, context: int) -> float:
        """Share of the state it reads, for a context of `context`, that a token after `depth` ones reads or
        writes.
        """
        return 0.0

    def state_operations(self, tokens: int, start: int) -> float:
        """Arithmetic operations with the state of `tokens` tokens after `start` positions."""
        return 0.0

    def cpu_buffers(self, hidden_size: int) -> dict[str, int]:
        """Name -> bytes per token of the block's buffers on the CPU; blocks share buffers of one name."""
        return {}

    def cpu_scratch(self) -> int:
        """Bytes of scratch memory for each CPU thread."""
        return 0

    def cpu_states(self, threads: int) -> int:
        """Bytes of partial results that the CPU threads exchange."""
        return 0

    def inputs(self) -> list[MatrixSize]:
        """The matrices that read the normed hidden states; those of all experts stacked."""
        raise NotImplementedError

    def stacked_inputs(self) -> list[MatrixSize]:
        """As `inputs`; matrices that a GPU multiplies in one launch are one matrix."""
        return self.inputs()

    def outputs(self) -> list[MatrixSize]:
        """The matrices whose products are added to the hidden states; those of all experts stacked."""
        raise NotImplementedError

    def inner(self) -> list[MatrixSize]:
        """Large matrices between inputs and outputs."""
        return []

    def rope_table(self) -> tuple[RopeSpec | None, int] | None:
        """The RoPE and the row length of the table that a GPU reads; None: no table."""
        return None

    @property
    def is_recurrent(self) -> bool:
        """Whether the state is recurrent."""
        return False

    @classmethod
    def step_bytes(cls, blocks: Sequence[Self], step: StepShape) -> int:
        """Bytes of the buffers of a decode step on a GPU for all blocks of this kind."""
        return 0

    @classmethod
    def prompt_bytes(cls, blocks: Sequence[Self], chunk: int, hidden_size: int) -> int:
        """Bytes of a chunk's buffers on a GPU for all blocks of this kind, without the shared ones."""
        return 0

    def chunk_rows(self, chunk: int, hidden_size: int) -> ChunkRows:
        """The shared buffers that the block needs for a chunk."""
        return ChunkRows()

    def streamed_vector_bytes(self) -> int:
        """Bytes of the vectors that are on a GPU while a prompt streams the block's matrices to it."""
        raise NotImplementedError

    @classmethod
    def streamed_state_bytes(cls, blocks: Sequence[Self], context: int) -> int:
        """Bytes of the state of one block at a time, on a GPU while a prompt streams the matrices."""
        return 0


@dataclass(frozen=True)
class DivisibleSizes(BlockSizes):
    """A block of units, hottest first: the neurons of a feed-forward, or the experts of an MoE block."""

    is_divisible: ClassVar[bool] = True
    granules_label: ClassVar[str]
    """The name of the units' part in plans."""
    granule_name: ClassVar[str]
    """What is counted, if it isn't `granules_label`."""
    is_routed: ClassVar[bool]
    """Whether a token reads only the units that a router selects for it."""

    @property
    def granules(self) -> int:
        """Number of units."""
        raise NotImplementedError

    @property
    def granules_per_token(self) -> int:
        """Number of units that a token reads."""
        return self.granules

    @property
    def is_joined(self) -> bool:
        """Whether the sum of the units is added on the device of the undivided blocks, also if that has no
        units.
        """
        return self.is_routed

    def undivided_vectors(self) -> tuple[int, ...]:
        """Lengths of the vectors that exist once, however the units are divided."""
        return ()

    def replicated(self) -> list[MatrixSize]:
        """The matrices of `undivided` that each device with units needs."""
        return []

    def granule_counts(self) -> list[int]:
        """The numbers of units that can be on one device."""
        raise NotImplementedError

    def part(self, granules: int) -> Self:
        """The sizes of a part with this many units."""
        raise NotImplementedError

    def granule_matrices(self) -> list[MatrixSize]:
        """The matrices of all units together; of one expert if the block is routed."""
        raise NotImplementedError

    def granules_device_bytes(self) -> int:
        """Bytes of `granule_matrices` on a GPU, with their vectors. Raises `UnsupportedOnDeviceError`."""
        raise NotImplementedError

    @property
    def file_bytes(self) -> int:
        """Bytes of the units in the file."""
        times = self.granules if self.is_routed else 1
        return times * sum(matrix.nbytes for matrix in self.granule_matrices())
