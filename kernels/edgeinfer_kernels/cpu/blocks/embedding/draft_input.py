"""The structure that the kernel of a draft head's input reads."""

from edgeinfer_kernels.blocks.embedding.draft_input import PAIR, STATES, DraftInputSpec, DraftInputWeights
from edgeinfer_kernels.cpu.block_builder import NORMED, BlockBuilder, BlockOptions, BuiltBlock, Call
from edgeinfer_kernels.cpu.runtime.embedding_args import DraftInputArgs
from edgeinfer_kernels.decoder import ResidualBlock, ResidualWeights

UNITS = ("embedding.draft_input",)
"""Units of compiled kernels besides the common one."""


def build(
    builder: BlockBuilder,
    residual: ResidualBlock[DraftInputSpec],
    weights: ResidualWeights[DraftInputWeights],
    state: None,
    options: BlockOptions,
) -> BuiltBlock:
    """The kernel of a draft head's input. A drafted token's state is the row that the head has normed."""
    norm, w, width = residual.block.norm, weights.block, builder.width
    states, states_stride = builder.workspace.rows(STATES)
    block = builder.arena.fill(
        DraftInputArgs,
        states=states,
        states_stride=states_stride,
        own=builder.workspace.rows(NORMED)[0],
        enorm=builder.norm(norm, width, w.enorm),
        hnorm=builder.norm(norm, width, w.hnorm),
        pair=builder.input(PAIR, 2 * width, [w.eh_proj]),
        state_offset=4 * width,
        eh_proj=builder.matrix(w.eh_proj),
        **builder.scratch(),
    )
    call = Call("draft_input_block", block, ends_by_token=True, ends_everywhere=True, begins_by_token=True)
    return BuiltBlock((call,))
