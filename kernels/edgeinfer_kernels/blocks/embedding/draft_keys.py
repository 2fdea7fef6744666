"""Keys and values of a target's states in the cache of a block drafter's layer: specification and sizes."""

from dataclasses import dataclass
from typing import ClassVar

from edgeinfer_kernels.blocks.attention import AttentionSpec, AttentionWeights
from edgeinfer_kernels.blocks.common.block import BlockWeights, StatelessSpec
from edgeinfer_kernels.blocks.common.block_sizes import BlockSizes, NormLengths
from edgeinfer_kernels.matrix import Matrix, MatrixSize


@dataclass(frozen=True)
class DraftKeysSpec(StatelessSpec):
    """The cache of the attention block at the begin of a later `layer` gets the keys and values of x, as if
    its tokens were those of x. x remains as it is.
    """

    kind: ClassVar[str] = "embedding.draft_keys"
    is_divisible: ClassVar[bool] = False

    attention: AttentionSpec
    layer: int

    def sizes(self, weights: "DraftKeysWeights", norms: NormLengths) -> "DraftKeysSizes":
        return DraftKeysSizes()


@dataclass(frozen=True)
class DraftKeysWeights(BlockWeights):
    """The weights of the attention block."""

    kind: ClassVar[str] = "embedding.draft_keys"

    attention: AttentionWeights

    def matrices(self) -> list[Matrix]:
        """None: they are those of the attention block."""
        return []


@dataclass(frozen=True)
class DraftKeysSizes(BlockSizes):
    """No sizes besides those of the attention block, whose buffers the kernel uses."""

    label: ClassVar[str] = "draft keys"

    def undivided(self) -> list[MatrixSize]:
        return []

    def undivided_device_bytes(self) -> int:
        return 0

    def streamed_vector_bytes(self) -> int:
        return 0

    def inputs(self) -> list[MatrixSize]:
        return []

    def outputs(self) -> list[MatrixSize]:
        return []
