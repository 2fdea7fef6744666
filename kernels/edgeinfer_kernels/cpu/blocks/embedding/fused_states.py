"""The structure that the kernel of a target's fused states reads."""

from edgeinfer_kernels.blocks.embedding.draft_input import STATES
from edgeinfer_kernels.blocks.embedding.fused_states import FusedStatesSpec, FusedStatesWeights
from edgeinfer_kernels.cpu.block_builder import BlockBuilder, BlockOptions, BuiltBlock, Call
from edgeinfer_kernels.cpu.runtime.embedding_args import FusedStatesArgs
from edgeinfer_kernels.decoder import ResidualBlock, ResidualWeights

UNITS = ("embedding.fused_states",)
"""Units of compiled kernels besides the common one."""


def build(
    builder: BlockBuilder,
    residual: ResidualBlock[FusedStatesSpec],
    weights: ResidualWeights[FusedStatesWeights],
    state: None,
    options: BlockOptions,
) -> BuiltBlock:
    """The kernel of a target's fused states, which replaces x."""
    spec, w = residual.block, weights.block
    block = builder.arena.fill(
        FusedStatesArgs,
        features=builder.input(STATES, spec.features, [w.fc]),
        fc=builder.matrix(w.fc),
        norm=builder.norm(spec.norm, builder.width, w.norm),
        **builder.scratch(),
    )
    return BuiltBlock((Call("fused_states_block", block),))
