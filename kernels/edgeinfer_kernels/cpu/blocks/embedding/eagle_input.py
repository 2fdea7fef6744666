"""The structure that the kernel of an EAGLE-3 head's input reads."""

from edgeinfer_kernels.blocks.embedding.draft_input import PAIR, STATES
from edgeinfer_kernels.blocks.embedding.eagle_input import OWN_STATES, EagleInputSpec, EagleInputWeights
from edgeinfer_kernels.cpu.block_builder import BlockBuilder, BlockOptions, BuiltBlock, Call
from edgeinfer_kernels.cpu.runtime.embedding_args import EagleInputArgs
from edgeinfer_kernels.decoder import ResidualBlock, ResidualWeights

UNITS = ("embedding.eagle_input",)
"""Units of compiled kernels besides the common one."""


def build(
    builder: BlockBuilder,
    residual: ResidualBlock[EagleInputSpec],
    weights: ResidualWeights[EagleInputWeights],
    state: None,
    options: BlockOptions,
) -> BuiltBlock:
    """The kernel of an EAGLE-3 head's input, which writes the rows that attention reads."""
    spec, w, width = residual.block, weights.block, builder.width
    own, own_stride = builder.workspace.rows(OWN_STATES)
    block = builder.arena.fill(
        EagleInputArgs,
        features=builder.input(STATES, spec.features, [w.fc]),
        feature_norm=builder.norm(spec.norm, spec.features, w.feature_norm),
        fc=builder.matrix(w.fc),
        own=own,
        own_stride=own_stride,
        enorm=builder.norm(spec.norm, width, w.enorm),
        hnorm=builder.norm(spec.norm, width, w.hnorm),
        pair=builder.input(PAIR, 2 * width, []),
        state_offset=4 * width,
        norm_before_residual=int(spec.norm_before_residual),
        **builder.scratch(),
    )
    return BuiltBlock((Call("eagle_input_block", block),))
