"""The structure that the attention kernel reads."""

import numpy as np

from edgeinfer_kernels.blocks.attention import AttentionSpec, AttentionState, AttentionWeights
from edgeinfer_kernels.blocks.common.temperature import Temperature
from edgeinfer_kernels.cpu.block_builder import BlockBuilder, BlockOptions, BuiltBlock, Call
from edgeinfer_kernels.cpu.layout.packed_matrix import padded_vector
from edgeinfer_kernels.cpu.runtime.abi import CACHE_KINDS, PIECES_PER_THREAD, POSITIONS_PER_PIECE
from edgeinfer_kernels.cpu.runtime.block_args import AttentionArgs
from edgeinfer_kernels.decoder import ResidualBlock, ResidualWeights
from edgeinfer_kernels.layer_cache import LayerCache, padded

QK_NORMS = {"none": 0, "head": 1, "row": 2}
UNITS: tuple[str, ...] = ()
"""Units of compiled kernels besides the common one."""


def build(
    builder: BlockBuilder,
    residual: ResidualBlock[AttentionSpec],
    weights: ResidualWeights[AttentionWeights],
    state: AttentionState,
    options: BlockOptions,
) -> BuiltBlock:
    """The kernel of an attention block on its KV cache."""
    spec, w = residual.block, weights.block
    queries_only = spec.source_layer is not None
    norm_width = w.attn_q.rows if spec.qk_norm == "row" else spec.head_dim
    kv_norm_width = w.attn_k.rows if spec.qk_norm == "row" else spec.head_dim
    block = builder.arena.fill(
        AttentionArgs,
        q_matrix=builder.matrix(w.attn_q, w.attn_q_bias),
        k_matrix=0 if queries_only else builder.matrix(w.attn_k, w.attn_k_bias),
        v_matrix=0 if queries_only else builder.matrix(w.attn_v, w.attn_v_bias),
        output_matrix=builder.matrix(w.attn_output, w.attn_output_bias),
        q_norm=builder.norm(spec.norm, norm_width, w.attn_q_norm) if spec.qk_norm != "none" else 0,
        k_norm=builder.norm(spec.norm, kv_norm_width, w.attn_k_norm) if w.attn_k_norm is not None else 0,
        value_norm=builder.norm(spec.norm, spec.head_dim, np.ones(spec.head_dim, np.float32))
        if spec.value_norm
        else 0,
        queries_only=int(queries_only),
        normed=builder.input("normed", builder.width, w.inputs()),
        attn_out=builder.input("attn_out", spec.heads * spec.head_dim, [w.attn_output]),
        sinks=builder.arena.keep(w.attn_sinks),
        **temperature_fields(builder, spec.temperature, state.cache.positions),
        query_weights=builder.arena.keep(padded_vector(w.query_weights)),
        **_specification(spec),
        **_cache(builder, state.cache),
        **_buffers(builder),
        **builder.norms(residual, weights),
        **builder.scratch(),
    )
    return BuiltBlock((Call("attention_block", block, ends_by_token=True),), rope=spec.rope)


def temperature_fields(builder: BlockBuilder, temperature: Temperature, positions: int) -> dict[str, int]:
    """The fields of the factors of queries."""
    table = temperature.table(positions) if temperature else None
    return {
        "temperatures": builder.arena.keep(table),
        "temperature_length": temperature.length,
        "temperature_offset": temperature.offset,
    }


def _specification(spec: AttentionSpec) -> dict[str, float]:
    return {
        "heads": spec.heads,
        "kv_heads": spec.kv_heads,
        "head_dim": spec.head_dim,
        "padded_head": padded(spec.head_dim),
        "window": spec.window,
        "chunked": int(spec.chunked),
        "scale": spec.scale,
        "soft_cap": spec.soft_cap,
        "rope_dim": spec.rope.dimensions if spec.rope else 0,
        "rope_neox": int(spec.rope.neox) if spec.rope else 0,
        "qk_norm": QK_NORMS[spec.qk_norm],
        "gated": int(spec.gated),
        "value_dim": spec.head_dim,
        "padded_value": padded(spec.head_dim),
        "row_width": padded(spec.head_dim),
        "pieces_per_thread": PIECES_PER_THREAD,
        "positions_per_piece": POSITIONS_PER_PIECE,
    }


def _cache(builder: BlockBuilder, cache: LayerCache) -> dict[str, int]:
    keep = builder.arena.keep
    return {
        "context": cache.positions,
        "ring": cache.ring,
        "cache_kind": CACHE_KINDS[cache.keys.dtype.name],
        "key_cache": keep(cache.keys),
        "value_cache": keep(cache.values),
        "key_scales": keep(cache.key_scales),
        "value_scales": keep(cache.value_scales),
    }


def _buffers(builder: BlockBuilder) -> dict[str, int]:
    """Addresses and strides of the buffers between the phases of the block."""
    fields, rows = {"states": builder.workspace.states}, builder.workspace.rows
    fields["projected_q"], fields["q_stride"] = rows("projected_q")
    fields["projected_k"], fields["kv_stride"] = rows("projected_k")
    fields["projected_v"], _ = rows("projected_v")
    fields["queries"], fields["query_stride"] = rows("queries")
    fields["projected"], fields["projected_stride"] = rows("projected")
    return fields
