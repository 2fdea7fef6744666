"""The structure that the kernels of a block drafter's convolutions read."""

import numpy as np

from edgeinfer_kernels.blocks.embedding.convolved_input import (
    CONVOLVED,
    FACTORS,
    RESIDUAL,
    ROWS,
    Convolution,
    ConvolvedInputSpec,
    ConvolvedInputWeights,
)
from edgeinfer_kernels.cpu.block_builder import BlockBuilder, BlockOptions, BuiltBlock, Call
from edgeinfer_kernels.cpu.runtime.embedding_args import ConvolutionArgs
from edgeinfer_kernels.decoder import ResidualBlock, ResidualWeights
from edgeinfer_kernels.matrix import Vector

UNITS = ("embedding.block_convolution",)
"""Units of compiled kernels besides the common one."""


def build(
    builder: BlockBuilder,
    residual: ResidualBlock[ConvolvedInputSpec],
    weights: ResidualWeights[ConvolvedInputWeights],
    state: None,
    options: BlockOptions,
) -> BuiltBlock:
    """The kernel of the convolution before a block."""
    spec, w = residual.block, weights.block
    block = builder.arena.fill(
        ConvolutionArgs,
        norm=builder.norm(residual.norm, builder.width, weights.norm, weights.norm_bias),
        rows=builder.input(ROWS, builder.width, [w.projection]),
        projection=builder.matrix(w.projection),
        **convolution_fields(builder, spec.convolution, w.base),
    )
    return BuiltBlock((Call("convolved_input_block", block),))


def convolution_fields(builder: BlockBuilder, convolution: Convolution, base: Vector) -> dict[str, int]:
    """The fields of either convolution of a block."""
    fields, rows = dict[str, int](), builder.workspace.rows
    for name, buffer in (("factors", FACTORS), ("residual", RESIDUAL), ("convolved", CONVOLVED)):
        fields[name], fields[f"{name}_stride"] = rows(buffer)
    return {
        "base": builder.arena.keep(np.ascontiguousarray(base, np.float32)),
        "taps": convolution.taps,
        "group_size": convolution.group_size,
        "width": builder.width,
        **fields,
        **builder.scratch(),
    }
