"""The structure that the short convolution's kernel reads."""

from edgeinfer_kernels.blocks.short_convolution import (
    ShortConvolutionSpec,
    ShortConvolutionWeights,
)
from edgeinfer_kernels.cpu.block_builder import BlockBuilder, BlockOptions, BuiltBlock, Call
from edgeinfer_kernels.cpu.layout.packed_matrix import padded_rows
from edgeinfer_kernels.cpu.runtime.recurrent_args import ShortConvolutionArgs
from edgeinfer_kernels.decoder import ResidualBlock, ResidualWeights
from edgeinfer_kernels.recurrent_state import RecurrentState

UNITS = ("short_convolution",)
"""Units of compiled kernels besides the common one."""


def build(
    builder: BlockBuilder,
    residual: ResidualBlock[ShortConvolutionSpec],
    weights: ResidualWeights[ShortConvolutionWeights],
    state: RecurrentState,
    options: BlockOptions,
) -> BuiltBlock:
    """The kernel of a short convolution."""
    spec, w = residual.block, weights.block
    rows = {name: builder.workspace.rows(f"convolution_{name}") for name in ("b", "c", "x")}
    projected, projected_stride = builder.workspace.rows("projected")
    block = builder.arena.fill(
        ShortConvolutionArgs,
        **builder.norms(residual, weights),
        b_matrix=builder.matrix(w.b),
        c_matrix=builder.matrix(w.c),
        x_matrix=builder.matrix(w.x),
        output_matrix=builder.matrix(w.output),
        normed=builder.input("normed", builder.width, [w.b, w.c, w.x]),
        conv_out=builder.input("conv_out", spec.channels, [w.output]),
        **{name: address for name, (address, _) in rows.items()},
        row_stride=rows["b"][1],
        channels=spec.channels,
        taps=spec.taps,
        weights=builder.arena.keep(padded_rows(w.taps)),
        state=builder.recurrent(state),
        projected=projected,
        projected_stride=projected_stride,
        **builder.scratch(),
    )
    return BuiltBlock((Call("short_convolution_block", block, ends_by_token=True),))
