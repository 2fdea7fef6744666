"""The structure that the latent attention kernel reads."""

from edgeinfer_kernels.blocks.latent_attention import (
    LatentAttentionSpec,
    LatentAttentionState,
    LatentAttentionWeights,
)
from edgeinfer_kernels.caches.latent_cache import LatentCache
from edgeinfer_kernels.caches.layer_cache import padded
from edgeinfer_kernels.cpu.block_builder import BlockBuilder, BlockOptions, BuiltBlock, Call
from edgeinfer_kernels.cpu.blocks.attention import temperature_fields
from edgeinfer_kernels.cpu.runtime.abi import (
    CACHE_KINDS,
    LATENT_PIECES_PER_THREAD,
    LATENT_POSITIONS_PER_PIECE,
)
from edgeinfer_kernels.cpu.runtime.block_args import AttentionArgs, CacheArgs, LatentAttentionArgs
from edgeinfer_kernels.decoder import ResidualBlock, ResidualWeights

UNITS = ("latent_attention",)
"""Units of compiled kernels besides the common one."""


def build(
    builder: BlockBuilder,
    residual: ResidualBlock[LatentAttentionSpec],
    weights: ResidualWeights[LatentAttentionWeights],
    state: LatentAttentionState,
    options: BlockOptions,
) -> BuiltBlock:
    """The kernel of a latent attention block on its cache."""
    spec, w = residual.block, weights.block
    first = w.attn_q if w.attn_q_a is None else w.attn_q_a
    projected, projected_stride = builder.workspace.rows("projected")
    nope, values = spec.heads * spec.nope_dim, spec.heads * spec.value_dim
    block = builder.arena.fill(
        LatentAttentionArgs,
        **builder.norms(residual, weights),
        query_a_matrix=0 if w.attn_q_a is None else builder.matrix(w.attn_q_a),
        query_matrix=builder.matrix(w.attn_q),
        kv_matrix=builder.matrix(w.attn_kv_a),
        key_matrix=builder.matrix(w.attn_k_b, adaptable=False),
        value_matrix=builder.matrix(w.attn_v_b, adaptable=False),
        output_matrix=builder.matrix(w.attn_output),
        query_norm=builder.norm(spec.norm, spec.query_rank, w.attn_q_a_norm),
        latent_norm=builder.norm(spec.norm, spec.latent_dim, w.attn_kv_a_norm),
        normed=builder.input("normed", builder.width, [first, w.attn_kv_a]),
        query_latents=builder.input("query_latents", spec.query_rank, [w.attn_q] if w.attn_q_a else []),
        nope_queries=builder.input("nope_queries", nope, [w.attn_k_b], tiles=False),
        attn_out=builder.input("attn_out", values, [w.attn_output]),
        attention=_attention(builder, spec, w, state.cache),
        nope_dim=spec.nope_dim,
        rope_dim=spec.rope_dim,
        latent_dim=spec.latent_dim,
        value_dim=spec.value_dim,
        has_rope=int(spec.rope is not None),
        projected=projected,
        projected_stride=projected_stride,
        **builder.scratch(),
    )
    return BuiltBlock((Call("latent_attention_block", block, ends_by_token=True),), rope=spec.rope)


def _attention(
    builder: BlockBuilder, spec: LatentAttentionSpec, w: LatentAttentionWeights, cache: LatentCache
) -> int:
    """Attention of all heads over the rows of the cache, which are both keys and values."""
    projected_q, q_stride = builder.workspace.rows("projected_q")
    projected_k, kv_stride = builder.workspace.rows("projected_k")
    queries, query_stride = builder.workspace.rows("queries")
    return builder.arena.fill(
        AttentionArgs,
        heads=spec.heads,
        kv_heads=1,
        head_dim=spec.cached_dim,
        padded_head=padded(spec.cached_dim),
        value_dim=spec.latent_dim,
        padded_value=spec.latent_dim,
        row_width=padded(spec.cached_dim),
        pieces_per_thread=LATENT_PIECES_PER_THREAD,
        positions_per_piece=LATENT_POSITIONS_PER_PIECE,
        cache=_cache(builder, cache),
        recent=0 if cache.recent is None else _cache(builder, cache.recent),
        scale=spec.scale,
        **temperature_fields(builder, spec.temperature, cache.positions),
        rope_dim=spec.rope.dimensions if spec.rope else 0,
        rope_neox=int(spec.rope.neox) if spec.rope else 0,
        attn_out=builder.input("head_latents", spec.heads * spec.latent_dim, [w.attn_v_b], tiles=False),
        queries=queries,
        query_stride=query_stride,
        states=builder.workspace.states,
        projected_q=projected_q,
        q_stride=q_stride,
        projected_k=projected_k,
        kv_stride=kv_stride,
    )


def _cache(builder: BlockBuilder, cache: LatentCache) -> int:
    """A cache whose rows are both keys and values."""
    rows, scales = builder.arena.keep(cache.rows), builder.arena.keep(cache.scales)
    return builder.arena.fill(
        CacheArgs,
        context=cache.positions,
        ring=cache.positions,
        key_kind=CACHE_KINDS[cache.row_type],
        value_kind=CACHE_KINDS[cache.row_type],
        key_cache=rows,
        value_cache=rows,
        key_scales=scales,
        value_scales=scales,
    )
