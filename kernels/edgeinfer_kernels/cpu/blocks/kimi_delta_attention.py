"""The structure that the kernel of a Kimi Delta Attention reads."""

from edgeinfer_kernels.blocks.kimi_delta_attention import (
    KimiDeltaAttentionSpec,
    KimiDeltaAttentionWeights,
)
from edgeinfer_kernels.cpu.block_builder import BlockBuilder, BlockOptions, BuiltBlock, Call
from edgeinfer_kernels.cpu.blocks.gated_delta_net import delta_rule, projection_back
from edgeinfer_kernels.cpu.runtime.recurrent_args import KimiDeltaAttentionArgs
from edgeinfer_kernels.decoder import ResidualBlock, ResidualWeights
from edgeinfer_kernels.recurrent_state import RecurrentState

UNITS = ("gated_delta_net",)
"""Units of compiled kernels besides the common one."""


def build(
    builder: BlockBuilder,
    residual: ResidualBlock[KimiDeltaAttentionSpec],
    weights: ResidualWeights[KimiDeltaAttentionWeights],
    state: RecurrentState,
    options: BlockOptions,
) -> BuiltBlock:
    """The kernel of a Kimi Delta Attention."""
    spec, w = residual.block, weights.block
    inputs = {"q": w.q, "k": w.k, "v": w.v, "f1": w.f1, "g1": w.g1, "beta": w.beta}
    heads = delta_rule(
        builder, spec, w, state,
        gate_parts=spec.heads, part_bytes=4 * spec.head_dim, decays_at=4 * spec.channels,
    )  # fmt: skip
    matrices = {**inputs, "f2": w.f2, "g2": w.g2}
    block = builder.arena.fill(
        KimiDeltaAttentionArgs,
        **builder.norms(residual, weights),
        **{f"{name}_matrix": builder.matrix(matrix) for name, matrix in matrices.items()},
        **projection_back(builder, spec.result_width, w.output),
        normed=builder.input("normed", builder.width, list(inputs.values())),
        low_f=builder.input("low_rank_f", spec.head_dim, [w.f2]),
        low_g=builder.input("low_rank_g", spec.head_dim, [w.g2]),
        heads=heads,
    )
    return BuiltBlock((Call("kimi_delta_attention_block", block, ends_by_token=True),))
