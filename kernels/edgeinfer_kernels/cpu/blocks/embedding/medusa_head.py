"""The structure that the kernel of a Medusa head reads."""

from edgeinfer_kernels.blocks.embedding.medusa_head import HIDDEN, LOGITS, MedusaHeadSpec, MedusaHeadWeights
from edgeinfer_kernels.cpu.block_builder import NORMED, BlockBuilder, BlockOptions, BuiltBlock, Call
from edgeinfer_kernels.cpu.runtime.embedding_args import MedusaHeadArgs
from edgeinfer_kernels.decoder import ResidualBlock, ResidualWeights

UNITS = ("embedding.medusa_head",)
"""Units of compiled kernels besides the common one."""


def build(
    builder: BlockBuilder,
    residual: ResidualBlock[MedusaHeadSpec],
    weights: ResidualWeights[MedusaHeadWeights],
    state: None,
    options: BlockOptions,
) -> BuiltBlock:
    """The kernel of a Medusa head."""
    w, width = weights.block, builder.width
    logits, logits_stride = builder.workspace.rows(LOGITS)
    block = builder.arena.fill(
        MedusaHeadArgs,
        norm=builder.norm(residual.norm, width, None),
        normed=builder.input(NORMED, width, [w.linear]),
        linear=builder.matrix(w.linear, w.bias),
        hidden=builder.input(HIDDEN, width, [w.output]),
        output=builder.matrix(w.output),
        logits=logits,
        logits_stride=logits_stride,
        **builder.scratch(),
    )
    return BuiltBlock((Call("medusa_head_block", block),))
