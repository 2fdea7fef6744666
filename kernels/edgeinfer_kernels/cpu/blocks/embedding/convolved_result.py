"""The kernel of the convolution after a block of a layer of a block drafter."""

from edgeinfer_kernels.blocks.embedding.convolved_result import ConvolvedResultSpec, ConvolvedResultWeights
from edgeinfer_kernels.cpu.block_builder import BlockBuilder, BlockOptions, BuiltBlock, Call
from edgeinfer_kernels.cpu.blocks.embedding.convolved_input import UNITS, convolution_fields
from edgeinfer_kernels.cpu.runtime.embedding_args import ConvolutionArgs
from edgeinfer_kernels.decoder import ResidualBlock, ResidualWeights

__all__ = ["UNITS", "build"]


def build(
    builder: BlockBuilder,
    residual: ResidualBlock[ConvolvedResultSpec],
    weights: ResidualWeights[ConvolvedResultWeights],
    state: None,
    options: BlockOptions,
) -> BuiltBlock:
    """The kernel, which reads the factors of the convolution before the block."""
    fields = convolution_fields(builder, residual.block.convolution, weights.block.base)
    return BuiltBlock((Call("convolved_result_block", builder.arena.fill(ConvolutionArgs, **fields)),))
