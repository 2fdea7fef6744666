"""The structure that the kernel of a block drafter's keys reads."""

from edgeinfer_kernels.blocks.attention import AttentionState
from edgeinfer_kernels.blocks.embedding.draft_keys import DraftKeysSpec, DraftKeysWeights
from edgeinfer_kernels.cpu.block_builder import BlockBuilder, BlockOptions, BuiltBlock, Call
from edgeinfer_kernels.cpu.blocks.attention import cached_rows
from edgeinfer_kernels.decoder import ResidualBlock, ResidualWeights

UNITS = ("embedding.draft_keys",)
"""Units of compiled kernels besides the common one."""


def build(
    builder: BlockBuilder,
    residual: ResidualBlock[DraftKeysSpec],
    weights: ResidualWeights[DraftKeysWeights],
    state: AttentionState,
    options: BlockOptions,
) -> BuiltBlock:
    """The kernel that writes the keys and values of x to the cache of an attention block."""
    spec = residual.block.attention
    block = cached_rows(builder, spec, weights.block.attention, state)
    return BuiltBlock((Call("draft_keys_block", block),), rope=spec.rope)
