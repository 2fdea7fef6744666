"""The structure that the kernel of learned positions reads."""

import numpy as np

from edgeinfer_kernels.blocks.embedding.positions import PositionEmbeddingSpec, PositionEmbeddingWeights
from edgeinfer_kernels.caches.layer_cache import padded
from edgeinfer_kernels.cpu.block_builder import BlockBuilder, BlockOptions, BuiltBlock, Call
from edgeinfer_kernels.cpu.runtime.embedding_args import PositionEmbeddingArgs
from edgeinfer_kernels.decoder import ResidualBlock, ResidualWeights

UNITS: tuple[str, ...] = ()
"""Units of compiled kernels besides the common one."""


def build(
    builder: BlockBuilder,
    residual: ResidualBlock[PositionEmbeddingSpec],
    weights: ResidualWeights[PositionEmbeddingWeights],
    state: None,
    options: BlockOptions,
) -> BuiltBlock:
    """The kernel of learned positions."""
    rows, width = weights.block.rows, padded(builder.width)
    table = np.zeros((rows.rows, width), np.float32)
    table[:, : builder.width] = rows.decoded()
    block = builder.arena.fill(
        PositionEmbeddingArgs,
        rows=builder.arena.keep(table),
        positions=rows.rows,
        row_bytes=4 * width,
        padded=width,
    )
    return BuiltBlock((Call("position_embedding_block", block),))
