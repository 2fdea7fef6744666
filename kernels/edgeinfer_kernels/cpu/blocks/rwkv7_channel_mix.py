"""The structure that the kernel of a channel mixing reads."""

from edgeinfer_kernels.blocks.rwkv7_channel_mix import Rwkv7ChannelMixSpec, Rwkv7ChannelMixWeights
from edgeinfer_kernels.cpu.block_builder import BlockBuilder, BlockOptions, BuiltBlock, Call
from edgeinfer_kernels.cpu.layout.packed_matrix import padded_vector
from edgeinfer_kernels.cpu.runtime.recurrent_args import Rwkv7ChannelMixArgs
from edgeinfer_kernels.decoder import ResidualBlock, ResidualWeights
from edgeinfer_kernels.recurrent_state import RecurrentState

UNITS = ("rwkv7_channel_mix",)
"""Units of compiled kernels besides the common one."""


def build(
    builder: BlockBuilder,
    residual: ResidualBlock[Rwkv7ChannelMixSpec],
    weights: ResidualWeights[Rwkv7ChannelMixWeights],
    state: RecurrentState,
    options: BlockOptions,
) -> BuiltBlock:
    """The kernel of a channel mixing."""
    spec, w = residual.block, weights.block
    projected, projected_stride = builder.workspace.rows("projected")
    block = builder.arena.fill(
        Rwkv7ChannelMixArgs,
        **builder.norms(residual, weights),
        key_matrix=builder.matrix(w.key),
        value_matrix=builder.matrix(w.value),
        mixed_k=builder.input("mixed_k", spec.width, [w.key]),
        hidden=builder.input("hidden", spec.neurons, [w.value]),
        state=builder.recurrent(state),
        lerp=builder.arena.keep(padded_vector(w.lerp)),
        projected=projected,
        projected_stride=projected_stride,
        **builder.scratch(),
    )
    return BuiltBlock((Call("rwkv7_channel_mix_block", block, ends_by_token=True),))
