"""The structure that the kernel of a Mamba-2 block reads."""

import numpy as np

from edgeinfer_kernels.blocks.mamba2 import Mamba2Spec, Mamba2Weights
from edgeinfer_kernels.caches.layer_cache import padded
from edgeinfer_kernels.cpu.block_builder import BlockBuilder, BlockOptions, BuiltBlock, Call
from edgeinfer_kernels.cpu.layout.packed_matrix import padded_rows, padded_vector
from edgeinfer_kernels.cpu.runtime.recurrent_args import Mamba2Args
from edgeinfer_kernels.decoder import ResidualBlock, ResidualWeights
from edgeinfer_kernels.recurrent_state import RecurrentState

UNITS = ("mamba2",)
"""Units of compiled kernels besides the common one."""


def build(
    builder: BlockBuilder,
    residual: ResidualBlock[Mamba2Spec],
    weights: ResidualWeights[Mamba2Weights],
    state: RecurrentState,
    options: BlockOptions,
) -> BuiltBlock:
    """The kernel of a Mamba-2 block."""
    spec, w, keep = residual.block, weights.block, builder.arena.keep
    bias = np.zeros(spec.channels, np.float32) if w.taps_bias is None else w.taps_bias
    z, z_stride = builder.workspace.rows("projected_z")
    conv_rows, conv_stride = builder.workspace.rows("conv_rows")
    projected, projected_stride = builder.workspace.rows("projected")
    block = builder.arena.fill(
        Mamba2Args,
        **builder.norms(residual, weights),
        z_matrix=builder.matrix(w.z),
        xbc_matrix=builder.matrix(w.xbc),
        dt_matrix=builder.matrix(w.dt),
        output_matrix=builder.matrix(w.output),
        group_norm=keep(padded_vector(w.norm)),
        epsilon=spec.norm.epsilon,
        normed=builder.input("normed", builder.width, [w.xbc, w.z, w.dt]),
        conv_out=builder.input("attn_out", spec.inner_size, [w.output]),
        state=builder.recurrent(state),
        heads=spec.heads,
        head_dim=spec.head_dim,
        state_size=spec.state_size,
        groups=spec.groups,
        channels=spec.channels,
        taps=spec.taps,
        tap_weights=keep(padded_rows(w.taps)),
        tap_bias=keep(padded_vector(bias)),
        a=keep(padded_vector(w.a)),
        d=keep(padded_vector(w.d)),
        dt_bias=keep(padded_vector(w.dt_bias)),
        dt_at=4 * padded(spec.channels),
        conv_rows=conv_rows,
        conv_stride=conv_stride,
        z=z,
        z_stride=z_stride,
        projected=projected,
        projected_stride=projected_stride,
        **builder.scratch(),
    )
    return BuiltBlock((Call("mamba2_block", block, ends_by_token=True),))
