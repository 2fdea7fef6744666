"""The structure that the kernel of a Gemma 4 assistant's input reads."""

from edgeinfer_kernels.blocks.embedding.assistant_input import AssistantInputSpec, AssistantInputWeights
from edgeinfer_kernels.blocks.embedding.draft_input import STATES
from edgeinfer_kernels.blocks.embedding.eagle_input import OWN_STATES
from edgeinfer_kernels.cpu.block_builder import BlockBuilder, BlockOptions, BuiltBlock, Call
from edgeinfer_kernels.cpu.runtime.embedding_args import AssistantInputArgs
from edgeinfer_kernels.decoder import ResidualBlock, ResidualWeights

UNITS = ("embedding.assistant_input",)
"""Units of compiled kernels besides the common one."""


def build(
    builder: BlockBuilder,
    residual: ResidualBlock[AssistantInputSpec],
    weights: ResidualWeights[AssistantInputWeights],
    state: None,
    options: BlockOptions,
) -> BuiltBlock:
    """The kernel of an assistant's input, which writes x."""
    target_width, w = residual.block.target_width, weights.block
    block = builder.arena.fill(
        AssistantInputArgs,
        states=builder.input(STATES, 2 * target_width, [w.pre]),
        own=builder.input(OWN_STATES, builder.width, [w.post]),
        state_offset=4 * target_width,
        pre=builder.matrix(w.pre),
        post=builder.matrix(w.post),
        **builder.scratch(),
    )
    return BuiltBlock((Call("assistant_input_block", block),))
