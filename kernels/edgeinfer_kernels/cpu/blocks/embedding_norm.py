"""The structure that the kernel of the embedding's norm reads."""

from edgeinfer_kernels.blocks.embedding_norm import EmbeddingNormSpec, EmbeddingNormWeights
from edgeinfer_kernels.cpu.block_builder import BlockBuilder, BlockOptions, BuiltBlock, Call
from edgeinfer_kernels.cpu.runtime.embedding_args import EmbeddingNormArgs
from edgeinfer_kernels.decoder import ResidualBlock, ResidualWeights

UNITS: tuple[str, ...] = ()
"""Units of compiled kernels besides the common one."""


def build(
    builder: BlockBuilder,
    residual: ResidualBlock[EmbeddingNormSpec],
    weights: ResidualWeights[EmbeddingNormWeights],
    state: None,
    options: BlockOptions,
) -> BuiltBlock:
    """The kernel of the embedding's norm."""
    w = weights.block
    norm = builder.norm(residual.block.norm, builder.width, w.weight, w.bias)
    return BuiltBlock((Call("embedding_norm_block", builder.arena.fill(EmbeddingNormArgs, norm=norm)),))
