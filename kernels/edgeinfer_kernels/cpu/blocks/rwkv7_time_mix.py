"""The structure that the kernel of a time mixing reads."""

from edgeinfer_kernels.blocks.rwkv7_time_mix import MIXED, Rwkv7TimeMixSpec, Rwkv7TimeMixWeights
from edgeinfer_kernels.caches.layer_cache import padded
from edgeinfer_kernels.cpu.block_builder import BlockBuilder, BlockOptions, BuiltBlock, Call
from edgeinfer_kernels.cpu.layout.packed_matrix import padded_rows, padded_vector
from edgeinfer_kernels.cpu.runtime.recurrent_args import Rwkv7TimeMixArgs
from edgeinfer_kernels.decoder import ResidualBlock, ResidualWeights
from edgeinfer_kernels.matrix import Matrix
from edgeinfer_kernels.recurrent_state import RecurrentState

UNITS = ("rwkv7_time_mix",)
"""Units of compiled kernels besides the common one."""


def build(
    builder: BlockBuilder,
    residual: ResidualBlock[Rwkv7TimeMixSpec],
    weights: ResidualWeights[Rwkv7TimeMixWeights],
    state: RecurrentState,
    options: BlockOptions,
) -> BuiltBlock:
    """The kernel of a time mixing."""
    spec, w, keep, workspace = residual.block, weights.block, builder.arena.keep, builder.workspace
    low: dict[str, tuple[Matrix | None, Matrix | None]] = {
        "w": (w.w1, w.w2),
        "a": (w.a1, w.a2),
        "v": (w.v1, w.v2),
        "g": (w.g1, w.g2),
    }
    readers = {"r": w.receptance, "k": w.key, "v": w.value}
    ranks = dict(zip("wavg", spec.ranks, strict=True))
    fields: dict[str, float] = {}
    for name in MIXED:
        first = low.get(name, (None, None))[0]
        found = [matrix for matrix in (readers.get(name), first) if matrix is not None]
        fields[f"mixed_{name}"] = builder.input(f"mixed_{name}", spec.width, found)
    for name, (first, second) in low.items():
        fields[f"{name}1_matrix"] = 0 if first is None else builder.matrix(first)
        fields[f"{name}2_matrix"] = 0 if second is None else builder.matrix(second)
        found = [] if second is None else [second]
        fields[f"low_{name}"] = builder.input(f"low_rank_{name}", ranks[name], found)
    vectors = {"w0": w.w0, "a0": w.a0, "v0": w.v0, "k_k": w.k_k, "k_a": w.k_a, "r_k": w.r_k}
    vectors |= {"head_weight": w.norm, "head_bias": w.norm_bias}
    buffers = {name: workspace.rows(name) for name in ("receptance", "first_value", "value_rate")}
    gate, row_stride = workspace.rows("projected_z")
    projected, projected_stride = workspace.rows("projected")
    block = builder.arena.fill(
        Rwkv7TimeMixArgs,
        **builder.norms(residual, weights),
        **fields,
        **{name: keep(padded_vector(vector)) for name, vector in vectors.items()},
        **{name: address for name, (address, _) in buffers.items()},
        receptance_matrix=builder.matrix(w.receptance),
        key_matrix=builder.matrix(w.key),
        value_matrix=builder.matrix(w.value),
        output_matrix=builder.matrix(w.output),
        head_epsilon=spec.head_epsilon,
        is_first=int(spec.is_first),
        conv_out=builder.input("attn_out", spec.width, [w.output]),
        state=builder.recurrent(state),
        heads=spec.heads,
        head_dim=spec.head_dim,
        part_bytes=4 * padded(spec.width),
        lerp=keep(padded_rows(w.lerp)),
        gate=gate,
        row_stride=row_stride,
        projected=projected,
        projected_stride=projected_stride,
        **builder.scratch(),
    )
    return BuiltBlock((Call("rwkv7_time_mix_block", block, ends_by_token=True),))
