"""The structure that the kernel of a gated delta net reads."""

from edgeinfer_kernels.blocks.gated_delta_net import GatedDeltaNetSpec, GatedDeltaNetWeights
from edgeinfer_kernels.blocks.kimi_delta_attention import (
    KimiDeltaAttentionSpec,
    KimiDeltaAttentionWeights,
)
from edgeinfer_kernels.cpu.blocks.builder import BlockBuilder, BlockOptions, BuiltBlock, Call
from edgeinfer_kernels.cpu.layout.packed_matrix import padded_rows, padded_vector
from edgeinfer_kernels.cpu.runtime.recurrent_args import GatedDeltaNetArgs
from edgeinfer_kernels.decoder import ResidualBlock, ResidualWeights
from edgeinfer_kernels.layer_cache import padded
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
    block = builder.arena.fill(
        GatedDeltaNetArgs,
        **builder.norms(residual, weights),
        **delta_rule_args(builder, spec, w),
        qkv_matrix=builder.matrix(w.qkv),
        z_matrix=builder.matrix(w.z),
        beta_matrix=builder.matrix(w.beta),
        alpha_matrix=builder.matrix(w.alpha),
        output_matrix=builder.matrix(w.output),
        normed=builder.input("normed", builder.width, [w.qkv, w.z, w.beta, w.alpha]),
        state=builder.recurrent(state),
        gate_parts=1,
        part_bytes=4 * padded(spec.value_heads),
        decays_at=0,
        silu_gate=1,
    )
    return BuiltBlock((Call("gated_delta_net_block", block, ends_by_token=True),))


def delta_rule_args(
    builder: BlockBuilder,
    spec: GatedDeltaNetSpec | KimiDeltaAttentionSpec,
    w: GatedDeltaNetWeights | KimiDeltaAttentionWeights,
) -> dict[str, float]:
    """The fields that do not depend on how β, g and the gate are computed."""
    keep, workspace = builder.arena.keep, builder.workspace
    fields: dict[str, float] = {}
    for name, buffer in (("z", "projected_z"), ("conv", "conv_rows"), ("projected", "projected")):
        address = "conv_rows" if name == "conv" else name
        fields[address], fields[f"{name}_stride"] = workspace.rows(buffer)
    return {
        **fields,
        **builder.scratch(),
        "head_norm": builder.norm(spec.norm, spec.head_dim, w.norm),
        "epsilon": spec.norm.epsilon,
        "conv_out": builder.input("attn_out", spec.value_width, [w.output]),
        "key_heads": spec.key_heads,
        "value_heads": spec.value_heads,
        "head_dim": spec.head_dim,
        "repeats_each": int(spec.repeats_each),
        "taps": spec.taps,
        "tap_weights": keep(padded_rows(w.taps)),
        "a": keep(padded_vector(w.a)),
        "dt": keep(padded_vector(w.dt)),
        "gates_at": 4 * padded(spec.channels),
        "gate_bytes": 4 * padded(spec.value_heads),
    }
