"""The arguments of the kernel of an encoder's attention."""

from edgeinfer_kernels.cpu.runtime.block_args import Input, Matrix, Norm
from edgeinfer_kernels.cpu.runtime.structure import Float, Int, Structure, structure


@structure()
class EncoderAttentionArgs(Structure):
    """Attention of an encoder. Fields that end in `stride` are bytes per token.

    bounds: for each token int64 first row and end of its text. qk_norm as in `AttentionArgs`. slopes: 0, or
    the float32 slopes of ALiBi by head; lane_indices: float32 0 to 15. keys: pages of sixteen tokens, in
    each page by head the elements of sixteen tokens; values: the same pages, by head in rows. page_bytes: of
    a page of either.
    """

    norm: Norm
    q_matrix: Matrix
    k_matrix: Matrix
    v_matrix: Matrix
    output_matrix: Matrix
    q_norm: Norm
    k_norm: Norm
    post_norm: Norm
    residual_scale: Float
    normed: Input
    attn_out: Input
    heads: Int
    kv_heads: Int
    head_dim: Int
    padded_head: Int
    window: Int
    scale: Float
    rope_dim: Int
    rope_neox: Int
    qk_norm: Int
    slopes: Int
    lane_indices: Int
    bounds: Int
    projected_q: Int
    projected_k: Int
    projected_v: Int
    q_stride: Int
    kv_stride: Int
    queries: Int
    query_stride: Int
    keys: Int
    values: Int
    page_bytes: Int
    projected: Int
    projected_stride: Int
    scratch: Int
    scratch_stride: Int
