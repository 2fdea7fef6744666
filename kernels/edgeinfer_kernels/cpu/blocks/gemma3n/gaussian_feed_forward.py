"""The structure that the kernel of a feed-forward with few active neurons reads."""

from edgeinfer_kernels.blocks.gemma3n.gaussian_feed_forward import (
    GaussianFeedForwardSpec,
    GaussianFeedForwardWeights,
)
from edgeinfer_kernels.cpu.block_builder import BlockBuilder, BlockOptions, BuiltBlock, Call
from edgeinfer_kernels.cpu.runtime.gemma3n_args import GaussianFeedForwardArgs
from edgeinfer_kernels.decoder import ResidualBlock, ResidualWeights

UNITS = ("gemma3n.gaussian_feed_forward",)
"""Units of compiled kernels besides the common one."""


def build(
    builder: BlockBuilder,
    residual: ResidualBlock[GaussianFeedForwardSpec],
    weights: ResidualWeights[GaussianFeedForwardWeights],
    state: None,
    options: BlockOptions,
) -> BuiltBlock:
    """The kernel of a feed-forward with few active neurons."""
    spec, w = residual.block, weights.block
    projected, projected_stride = builder.workspace.rows("projected")
    thresholds, threshold_stride = builder.workspace.rows("threshold")
    block = builder.arena.fill(
        GaussianFeedForwardArgs,
        **builder.norms(residual, weights),
        gate_matrix=builder.matrix(w.ffn_gate),
        up_matrix=builder.matrix(w.ffn_up),
        down_matrix=builder.matrix(w.ffn_down),
        activation=builder.activation(spec.activation),
        deviations=spec.deviations,
        normed=builder.input("normed", builder.width, [w.ffn_gate, w.ffn_up]),
        hidden=builder.input("hidden", spec.neurons, [w.ffn_down]),
        gate=builder.workspace.rows("gate")[0],
        thresholds=thresholds,
        threshold_stride=threshold_stride,
        projected=projected,
        projected_stride=projected_stride,
        **builder.scratch(),
    )
    return BuiltBlock((Call("gaussian_feed_forward_block", block, ends_by_token=True),))
