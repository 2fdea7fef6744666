"""The structure that Laurel's kernel reads."""

from edgeinfer_kernels.blocks.gemma3n.laurel import SUM_SCALE, LaurelSpec, LaurelWeights
from edgeinfer_kernels.cpu.block_builder import BlockBuilder, BlockOptions, BuiltBlock, Call
from edgeinfer_kernels.cpu.runtime.gemma3n_args import LaurelArgs
from edgeinfer_kernels.decoder import ResidualBlock, ResidualWeights

UNITS = ("gemma3n.laurel",)
"""Units of compiled kernels besides the common one."""


def build(
    builder: BlockBuilder,
    residual: ResidualBlock[LaurelSpec],
    weights: ResidualWeights[LaurelWeights],
    state: None,
    options: BlockOptions,
) -> BuiltBlock:
    """Laurel's kernel."""
    spec, w = residual.block, weights.block
    projected, projected_stride = builder.workspace.rows("projected")
    block = builder.arena.fill(
        LaurelArgs,
        norm=builder.norms(residual, weights)["norm"],
        normed=builder.input("normed", builder.width, [w.left]),
        left=builder.matrix(w.left),
        hidden=builder.input("hidden", w.left.rows, [w.right]),
        right=builder.matrix(w.right),
        post_norm=builder.norm(spec.norm, builder.width, w.post_norm),
        scale=SUM_SCALE,
        projected=projected,
        projected_stride=projected_stride,
        **builder.scratch(),
    )
    return BuiltBlock((Call("laurel_block", block, ends_by_token=True),))
