"""The structure that the kernel of a Mamba block reads."""

from edgeinfer_kernels.blocks.common.block import NormSpec
from edgeinfer_kernels.blocks.mamba import MambaSpec, MambaWeights, packed_decay
from edgeinfer_kernels.caches.layer_cache import padded
from edgeinfer_kernels.cpu.block_builder import BlockBuilder, BlockOptions, BuiltBlock, Call
from edgeinfer_kernels.cpu.layout.packed_matrix import padded_rows, padded_vector
from edgeinfer_kernels.cpu.runtime.recurrent_args import MambaArgs
from edgeinfer_kernels.decoder import ResidualBlock, ResidualWeights
from edgeinfer_kernels.recurrent_state import RecurrentState

UNITS = ("mamba",)
"""Units of compiled kernels besides the common one."""


def build(
    builder: BlockBuilder,
    residual: ResidualBlock[MambaSpec],
    weights: ResidualWeights[MambaWeights],
    state: RecurrentState,
    options: BlockOptions,
) -> BuiltBlock:
    """The kernel of a Mamba block."""
    spec, w, keep = residual.block, weights.block, builder.arena.keep
    norm = NormSpec("rms", spec.norm.epsilon)
    z, z_stride = builder.workspace.rows("projected_z")
    c, c_stride = builder.workspace.rows("mamba_c")
    projected, projected_stride = builder.workspace.rows("projected")
    block = builder.arena.fill(
        MambaArgs,
        **builder.norms(residual, weights),
        x_matrix=builder.matrix(w.x),
        z_matrix=builder.matrix(w.z),
        dt_matrix=builder.matrix(w.dt),
        b_matrix=builder.matrix(w.b),
        c_matrix=builder.matrix(w.c),
        delta_matrix=builder.matrix(w.delta),
        output_matrix=builder.matrix(w.output),
        dt_norm=builder.norm(norm, spec.dt_rank, w.dt_norm),
        b_norm=builder.norm(norm, spec.state_size, w.b_norm),
        c_norm=builder.norm(norm, spec.state_size, w.c_norm),
        normed=builder.input("normed", builder.width, [w.x, w.z]),
        inputs=builder.input("conv_rows", spec.channels, [w.dt, w.b, w.c]),
        dt=builder.input("mamba_dt", spec.dt_rank, [w.delta]),
        conv_out=builder.input("attn_out", spec.channels, [w.output]),
        state=builder.recurrent(state),
        channels=spec.channels,
        state_size=spec.state_size,
        taps=spec.taps,
        tap_weights=keep(padded_rows(w.taps)),
        tap_bias=keep(padded_vector(w.taps_bias)),
        dt_bias=keep(padded_vector(w.dt_bias)),
        a=keep(packed_decay(w.a)),
        skip=keep(padded_vector(w.skip)),
        delta_at=4 * padded(spec.channels),
        b_at=8 * padded(spec.channels),
        c=c,
        c_stride=c_stride,
        z=z,
        z_stride=z_stride,
        projected=projected,
        projected_stride=projected_stride,
        **builder.scratch(),
    )
    return BuiltBlock((Call("mamba_block", block, ends_by_token=True),))
