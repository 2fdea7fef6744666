"""The structure that the kernel of an encoder's attention reads."""

import numpy as np

from edgeinfer_kernels.blocks.encoder_attention import (
    TEXT_BOUNDS,
    EncoderAttentionSpec,
    EncoderAttentionWeights,
)
from edgeinfer_kernels.caches.layer_cache import padded
from edgeinfer_kernels.cpu.block_builder import BlockBuilder, BlockOptions, BuiltBlock, Call
from edgeinfer_kernels.cpu.blocks.attention import QK_NORMS
from edgeinfer_kernels.cpu.runtime.abi import POSITIONS_PER_PAGE
from edgeinfer_kernels.cpu.runtime.encoder_args import EncoderAttentionArgs
from edgeinfer_kernels.decoder import ResidualBlock, ResidualWeights

UNITS = ("encoder_attention",)
"""Units of compiled kernels besides the common one."""


def build(
    builder: BlockBuilder,
    residual: ResidualBlock[EncoderAttentionSpec],
    weights: ResidualWeights[EncoderAttentionWeights],
    state: None,
    options: BlockOptions,
) -> BuiltBlock:
    """The kernel of an encoder's attention."""
    spec, w = residual.block, weights.block.attention
    block = builder.arena.fill(
        EncoderAttentionArgs,
        q_matrix=builder.matrix(w.attn_q, w.attn_q_bias),
        k_matrix=builder.matrix(w.attn_k, w.attn_k_bias),
        v_matrix=builder.matrix(w.attn_v, w.attn_v_bias),
        output_matrix=builder.matrix(w.attn_output, w.attn_output_bias),
        normed=builder.input("normed", builder.width, [w.attn_q, w.attn_k, w.attn_v]),
        attn_out=builder.input("attn_out", spec.heads * spec.head_dim, [w.attn_output]),
        slopes=builder.arena.keep(spec.slopes()) if spec.alibi else 0,
        lane_indices=builder.arena.keep(np.arange(POSITIONS_PER_PAGE, dtype=np.float32)),
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        padded_head=padded(spec.head_dim),
        window=spec.window,
        scale=spec.scale,
        rope_dim=spec.rope.dimensions if spec.rope else 0,
        rope_neox=int(spec.rope.neox) if spec.rope else 0,
        qk_norm=QK_NORMS[spec.qk_norm],
        **_qk_norms(builder, spec, weights.block),
        **_buffers(builder, spec),
        **builder.norms(residual, weights),
        **builder.scratch(),
    )
    return BuiltBlock((Call("encoder_attention_block", block, ends_by_token=True),), rope=spec.rope)


def _qk_norms(
    builder: BlockBuilder, spec: EncoderAttentionSpec, w: EncoderAttentionWeights
) -> dict[str, int]:
    """The norms of queries and keys: of heads, or of whole rows."""
    by_row, matrices = spec.qk_norm == "row", w.attention
    q_width = matrices.attn_q.rows if by_row else spec.head_dim
    k_width = matrices.attn_k.rows if by_row else spec.head_dim
    return {
        "q_norm": builder.norm(spec.norm, q_width, matrices.attn_q_norm, w.q_norm_bias),
        "k_norm": builder.norm(spec.norm, k_width, matrices.attn_k_norm, w.k_norm_bias),
    }


def _buffers(builder: BlockBuilder, spec: EncoderAttentionSpec) -> dict[str, int]:
    """Addresses and strides of the buffers between the phases of the block."""
    rows = builder.workspace.rows
    fields = {"bounds": rows(TEXT_BOUNDS)[0]}
    fields["projected_q"], fields["q_stride"] = rows("projected_q")
    fields["projected_k"], fields["kv_stride"] = rows("projected_k")
    fields["projected_v"], _ = rows("projected_v")
    fields["queries"], fields["query_stride"] = rows("encoder_queries")
    fields["keys"], _ = rows("encoder_keys")
    fields["values"], _ = rows("encoder_values")
    fields["page_bytes"] = 4 * POSITIONS_PER_PAGE * spec.kv_heads * padded(spec.head_dim)
    fields["projected"], fields["projected_stride"] = rows("projected")
    return fields
