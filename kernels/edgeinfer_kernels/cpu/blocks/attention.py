"""The structure that the attention kernel reads."""

import numpy as np

from edgeinfer_kernels.blocks.attention import AttentionSpec, AttentionState, AttentionWeights
from edgeinfer_kernels.blocks.common.alibi import alibi_slopes
from edgeinfer_kernels.blocks.common.own_norms import OWN_INPUT
from edgeinfer_kernels.blocks.common.temperature import Temperature
from edgeinfer_kernels.blocks.embedding.draft_input import PAIR
from edgeinfer_kernels.caches.layer_cache import LANES, LayerCache, padded
from edgeinfer_kernels.cpu.block_builder import NORMED, BlockBuilder, BlockOptions, BuiltBlock, Call
from edgeinfer_kernels.cpu.layout.packed_matrix import padded_vector
from edgeinfer_kernels.cpu.runtime.abi import CACHE_KINDS, PIECES_PER_THREAD, POSITIONS_PER_PIECE
from edgeinfer_kernels.cpu.runtime.block_args import AttentionArgs, CacheArgs
from edgeinfer_kernels.decoder import ResidualBlock, ResidualWeights

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
    block = builder.arena.fill(
        AttentionArgs,
        q_matrix=builder.matrix(w.attn_q, w.attn_q_bias),
        output_matrix=builder.matrix(w.attn_output, w.attn_output_bias),
        q_norm=builder.norm(spec.norm, norm_width, w.attn_q_norm) if spec.qk_norm != "none" else 0,
        queries_only=int(queries_only),
        **({} if queries_only else _keys_and_values(builder, spec, w)),
        **_head_gates(builder, w),
        normed=_input(builder, residual, w),
        attn_out=builder.input("attn_out", spec.heads * spec.value_dim, [w.attn_output]),
        sub_norm=builder.sub_norm(spec.norm, w.sub_norm),
        slopes=builder.arena.keep(alibi_slopes(spec.heads, spec.alibi)) if spec.alibi else 0,
        lane_indices=builder.arena.keep(np.arange(LANES, dtype=np.float32)),
        sinks=builder.arena.keep(w.attn_sinks),
        **temperature_fields(builder, spec.temperature, state.cache.positions),
        query_weights=builder.arena.keep(padded_vector(w.query_weights)),
        **_specification(spec),
        **_caches(builder, state),
        **_buffers(builder),
        **builder.norms(residual, weights),
        **builder.scratch(),
    )
    before = builder.own_norm(residual, weights, w.inputs())
    everywhere = weights.post_norm is None
    call = Call("attention_block", block, ends_by_token=True, ends_everywhere=everywhere)
    return BuiltBlock((call,), before_parallel=before, rope=spec.rope)


def cached_rows(
    builder: BlockBuilder, spec: AttentionSpec, w: AttentionWeights, state: AttentionState
) -> int:
    """An AttentionArgs structure for the keys and values of x, without queries, norm and output."""
    return builder.arena.fill(
        AttentionArgs,
        norm=builder.norm(spec.norm, builder.width, None),
        normed=builder.input(NORMED, builder.width, [w.attn_k, w.attn_v]),
        **_keys_and_values(builder, spec, w),
        **_specification(spec),
        **_caches(builder, state),
        **_buffers(builder),
        **builder.scratch(),
    )


def _keys_and_values(builder: BlockBuilder, spec: AttentionSpec, w: AttentionWeights) -> dict[str, int]:
    """The fields of the projections of keys and values, and of their norms."""
    width = w.attn_k.rows if spec.qk_norm == "row" else spec.head_dim
    ones = np.ones(spec.head_dim, np.float32)
    return {
        "k_matrix": builder.matrix(w.attn_k, w.attn_k_bias),
        "v_matrix": builder.matrix(w.attn_v, w.attn_v_bias),
        "k_norm": builder.norm(spec.norm, width, w.attn_k_norm) if w.attn_k_norm is not None else 0,
        "value_norm": builder.norm(spec.norm, spec.head_dim, ones) if spec.value_norm else 0,
    }


def _input(builder: BlockBuilder, residual: ResidualBlock[AttentionSpec], w: AttentionWeights) -> int:
    """The rows that the projections read."""
    if residual.block.pair_input:
        return builder.input(PAIR, 2 * builder.width, w.inputs())
    return builder.input(OWN_INPUT if residual.has_own_norm else NORMED, builder.width, w.inputs())


def _head_gates(builder: BlockBuilder, w: AttentionWeights) -> dict[str, int]:
    """The fields of gates of whole heads."""
    if w.attn_gate is None:
        return {}
    rows, stride = builder.workspace.rows("head_gates")
    return {"gate_matrix": builder.matrix(w.attn_gate), "head_gates": rows, "head_gates_stride": stride}


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
        "whole_step": int(spec.whole_step),
        "scale": spec.scale,
        "soft_cap": spec.soft_cap,
        "clamp": spec.clamp,
        "rope_dim": spec.rope.dimensions if spec.rope else 0,
        "rope_neox": int(spec.rope.neox) if spec.rope else 0,
        "qk_norm": QK_NORMS[spec.qk_norm],
        "gated": int(spec.gated),
        "has_softplus_gates": int(spec.gate_function == "softplus"),
        "value_dim": spec.value_dim,
        "padded_value": padded(spec.value_dim),
        "row_width": padded(spec.head_dim),
        "pieces_per_thread": PIECES_PER_THREAD,
        "positions_per_piece": POSITIONS_PER_PIECE,
    }


def _caches(builder: BlockBuilder, state: AttentionState) -> dict[str, int]:
    recent = state.cache.recent
    return {
        "cache": _cache(builder, state.cache),
        "recent": 0 if recent is None else _cache(builder, recent),
    }


def _cache(builder: BlockBuilder, cache: LayerCache) -> int:
    keep = builder.arena.keep
    return builder.arena.fill(
        CacheArgs,
        context=cache.head_positions,
        ring=cache.ring,
        key_kind=CACHE_KINDS[cache.key_type],
        value_kind=CACHE_KINDS[cache.value_type],
        key_cache=keep(cache.keys),
        value_cache=keep(cache.values),
        key_scales=keep(cache.key_scales),
        value_scales=keep(cache.value_scales),
    )


def _buffers(builder: BlockBuilder) -> dict[str, int]:
    """Addresses and strides of the buffers between the phases of the block."""
    fields, rows = {"states": builder.workspace.states}, builder.workspace.rows
    fields["projected_q"], fields["q_stride"] = rows("projected_q")
    fields["projected_k"], fields["kv_stride"] = rows("projected_k")
    fields["projected_v"], _ = rows("projected_v")
    fields["queries"], fields["query_stride"] = rows("queries")
    fields["projected"], fields["projected_stride"] = rows("projected")
    return fields
