"""The structure that the attention kernel reads."""

from edgeinfer_kernels.blocks.attention import AttentionSpec, AttentionState, AttentionWeights
from edgeinfer_kernels.cpu.blocks.builder import BlockBuilder, BlockOptions, BuiltBlock, Call
from edgeinfer_kernels.cpu.runtime.abi import CACHE_KINDS
from edgeinfer_kernels.cpu.runtime.block_args import AttentionArgs
from edgeinfer_kernels.decoder import ResidualBlock, ResidualWeights
from edgeinfer_kernels.layer_cache import padded

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
    spec, w, cache = residual.block, weights.block, state.cache
    rows = builder.workspace.rows
    padded_head = padded(spec.head_dim)
    projected_q, q_stride = rows("projected_q")
    projected_k, kv_stride = rows("projected_k")
    projected_v, _ = rows("projected_v")
    queries, query_stride = rows("queries")
    projected, projected_stride = rows("projected")
    norm_width = w.attn_q.rows if spec.qk_norm == "row" else spec.head_dim
    kv_norm_width = w.attn_k.rows if spec.qk_norm == "row" else spec.head_dim
    block = builder.arena.fill(
        AttentionArgs,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        padded_head=padded_head,
        context=cache.positions,
        window=spec.window,
        scale=spec.scale,
        soft_cap=spec.soft_cap,
        rope_dim=spec.rope.dimensions if spec.rope else 0,
        rope_neox=int(spec.rope.neox) if spec.rope else 0,
        qk_norm=QK_NORMS[spec.qk_norm],
        cache_kind=CACHE_KINDS[cache.keys.dtype.name],
        key_cache=builder.arena.keep(cache.keys),
        value_cache=builder.arena.keep(cache.values),
        key_scales=builder.arena.keep(cache.key_scales),
        value_scales=builder.arena.keep(cache.value_scales),
        q_matrix=builder.matrix(w.attn_q, w.attn_q_bias),
        k_matrix=builder.matrix(w.attn_k, w.attn_k_bias),
        v_matrix=builder.matrix(w.attn_v, w.attn_v_bias),
        output_matrix=builder.matrix(w.attn_output, w.attn_output_bias),
        q_norm=builder.norm(spec.norm, norm_width, w.attn_q_norm) if spec.qk_norm != "none" else 0,
        k_norm=builder.norm(spec.norm, kv_norm_width, w.attn_k_norm) if spec.qk_norm != "none" else 0,
        **builder.norms(residual, weights),
        normed=builder.input("normed", builder.width, [w.attn_q, w.attn_k, w.attn_v]),
        attn_out=builder.input("mixed", spec.heads * spec.head_dim, [w.attn_output]),
        queries=queries,
        states=builder.workspace.states,
        projected_q=projected_q,
        projected_k=projected_k,
        projected_v=projected_v,
        projected=projected,
        q_stride=q_stride,
        kv_stride=kv_stride,
        query_stride=query_stride,
        projected_stride=projected_stride,
        sinks=builder.arena.keep(w.attn_sinks),
        **builder.scratch(),
    )
    return BuiltBlock((Call("attention_block", block, ends_by_token=True),), rope=spec.rope)
