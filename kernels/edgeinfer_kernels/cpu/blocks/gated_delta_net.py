"""The structure that the kernel of a gated delta net reads."""

from edgeinfer_kernels.blocks.gated_delta_net import GatedDeltaNetSpec, GatedDeltaNetWeights
from edgeinfer_kernels.blocks.kimi_delta_attention import (
    KimiDeltaAttentionSpec,
    KimiDeltaAttentionWeights,
)
from edgeinfer_kernels.caches.layer_cache import padded
from edgeinfer_kernels.cpu.block_builder import BlockBuilder, BlockOptions, BuiltBlock, Call
from edgeinfer_kernels.cpu.layout.packed_matrix import padded_rows, padded_vector
from edgeinfer_kernels.cpu.runtime.recurrent_args import DeltaRuleArgs, GatedDeltaNetArgs
from edgeinfer_kernels.decoder import ResidualBlock, ResidualWeights
from edgeinfer_kernels.matrix import Matrix
from edgeinfer_kernels.recurrent_state import RecurrentState

UNITS = ("gated_delta_net",)
"""Units of compiled kernels besides the common one."""


def build(
    builder: BlockBuilder,
    residual: ResidualBlock[GatedDeltaNetSpec],
    weights: ResidualWeights[GatedDeltaNetWeights],
    state: RecurrentState,
    options: BlockOptions,
) -> BuiltBlock:
    """The kernel of a gated delta net."""
    spec, w = residual.block, weights.block
    inputs = {"qkv": w.qkv, "z": w.z, "beta": w.beta, "alpha": w.alpha}
    heads = delta_rule(
        builder, spec, w, state, gate_parts=1, part_bytes=4 * padded(spec.value_heads), silu_gate=1
    )
    block = builder.arena.fill(
        GatedDeltaNetArgs,
        **builder.norms(residual, weights),
        **{f"{name}_matrix": builder.matrix(matrix) for name, matrix in inputs.items()},
        **projection_back(builder, spec.result_width, w.output),
        normed=builder.input("normed", builder.width, list(inputs.values())),
        heads=heads,
    )
    return BuiltBlock((Call("gated_delta_net_block", block, ends_by_token=True),))


def delta_rule(
    builder: BlockBuilder,
    spec: GatedDeltaNetSpec | KimiDeltaAttentionSpec,
    w: GatedDeltaNetWeights | KimiDeltaAttentionWeights,
    state: RecurrentState,
    **gates: int,
) -> int:
    """The structure of the heads; `gates`: its fields that depend on how g and the gate are computed."""
    keep = builder.arena.keep
    z, z_stride = builder.workspace.rows("projected_z")
    conv_rows, conv_stride = builder.workspace.rows("conv_rows")
    return builder.arena.fill(
        DeltaRuleArgs,
        head_norm=builder.norm(spec.norm, spec.head_dim, w.norm),
        epsilon=spec.norm.epsilon,
        conv_out=builder.input("attn_out", spec.result_width, [w.output]),
        state=builder.recurrent(state),
        key_heads=spec.key_heads,
        value_heads=spec.value_heads,
        head_dim=spec.head_dim,
        repeats_each=int(spec.repeats_each),
        taps=spec.taps,
        tap_weights=keep(padded_rows(w.taps)),
        a=keep(padded_vector(w.a)),
        dt=keep(padded_vector(w.dt)),
        gates_at=4 * padded(spec.channels),
        gate_bytes=4 * padded(spec.value_heads),
        conv_rows=conv_rows,
        conv_stride=conv_stride,
        z=z,
        z_stride=z_stride,
        **gates,
    )


def projection_back(builder: BlockBuilder, width: int, output: Matrix) -> dict[str, float]:
    """The fields of the last projection."""
    projected, projected_stride = builder.workspace.rows("projected")
    return {
        "output_matrix": builder.matrix(output),
        "conv_out": builder.input("attn_out", width, [output]),
        "projected": projected,
        "projected_stride": projected_stride,
        **builder.scratch(),
    }
