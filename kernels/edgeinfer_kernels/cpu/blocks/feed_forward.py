"""The structure that the dense feed-forward kernel reads."""

from edgeinfer_kernels.blocks.feed_forward import FeedForwardSpec, FeedForwardWeights
from edgeinfer_kernels.cpu.block_builder import BlockBuilder, BlockOptions, BuiltBlock, Call
from edgeinfer_kernels.cpu.runtime.block_args import FeedForwardArgs
from edgeinfer_kernels.decoder import ResidualBlock, ResidualWeights

UNITS: tuple[str, ...] = ()
"""Units of compiled kernels besides the common one."""


def build(
    builder: BlockBuilder,
    residual: ResidualBlock[FeedForwardSpec],
    weights: ResidualWeights[FeedForwardWeights],
    state: None,
    options: BlockOptions,
) -> BuiltBlock:
    """The kernel of a dense feed-forward."""
    spec, w = residual.block, weights.block
    hidden_width = w.ffn_up.rows
    readers = [w.ffn_up] if w.ffn_gate is None else [w.ffn_up, w.ffn_gate]
    projected, projected_stride = builder.workspace.rows("projected")
    gate, _ = builder.workspace.rows("gate")
    block = builder.arena.fill(
        FeedForwardArgs,
        gate_matrix=0 if w.ffn_gate is None else builder.matrix(w.ffn_gate, w.ffn_gate_bias, w.gate_scale),
        up_matrix=builder.matrix(w.ffn_up, w.ffn_up_bias, w.up_scale),
        down_matrix=builder.matrix(w.ffn_down, w.ffn_down_bias),
        **builder.norms(residual, weights),
        activation=builder.activation(spec.activation),
        normed=builder.input("normed", builder.width, readers),
        hidden=builder.input("hidden", hidden_width, [w.ffn_down]),
        sub_norm=0 if spec.sub_norm is None else builder.sub_norm(spec.sub_norm, w.sub_norm),
        gate=gate,
        projected=projected,
        projected_stride=projected_stride,
        **builder.scratch(),
    )
    everywhere = weights.post_norm is None
    call = Call("feed_forward_block", block, ends_by_token=True, ends_everywhere=everywhere)
    return BuiltBlock((call,))
