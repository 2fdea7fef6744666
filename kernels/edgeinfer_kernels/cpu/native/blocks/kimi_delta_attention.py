"""The Kimi Delta Attention block."""

from edgeinfer_kernels.cpu.native.blocks.gated_delta_net import convolve, gate_heads, recur
from edgeinfer_kernels.cpu.native.blocks.phases import (
    add_residual,
    first_weights,
    normalize_and_quantize,
    project,
    quantize_input,
)
from edgeinfer_kernels.cpu.native.blocks.recurrent_rows import keep_rows
from edgeinfer_kernels.cpu.native.blocks.thread_pool import (
    barrier,
    barrier_and_clear,
    barrier_prefetching,
)
from edgeinfer_kernels.cpu.native.simd.exports import Exports, device_function
from edgeinfer_kernels.cpu.runtime.abi import ACTIVATIONS_PER_BLOCK
from edgeinfer_kernels.cpu.runtime.kernel_args import StepArgs, ThreadPoolArgs
from edgeinfer_kernels.cpu.runtime.recurrent_args import KimiDeltaAttentionArgs

exports = Exports()


@device_function
def project_inputs(pool, thread, block, tokens, scratch):
    """Phase, with counters 1 to 6: the products of h. q, k, v and β are written to the rows of the state."""
    state, normed, f, g = block.state, block.normed, block.low_f, block.low_g
    rows, stride = state.rows, state.row_stride
    part = 4 * block.value_heads * block.head_dim
    gates = rows + block.gates_at
    project(pool, 1, thread, tokens, block.q_matrix, normed, rows, stride, scratch)
    project(pool, 2, thread, tokens, block.k_matrix, normed, rows + part, stride, scratch)
    project(pool, 3, thread, tokens, block.v_matrix, normed, rows + 2 * part, stride, scratch)
    project(pool, 4, thread, tokens, block.f1_matrix, normed, f.floats, f.float_stride, scratch)
    project(pool, 5, thread, tokens, block.g1_matrix, normed, g.floats, g.float_stride, scratch)
    project(pool, 6, thread, tokens, block.beta_matrix, normed, gates, stride, scratch)


@exports.add("kimi_delta_attention_block", KimiDeltaAttentionArgs, StepArgs, ThreadPoolArgs, int)
def kimi_delta_attention_block(block, step_args, pool, thread):
    """x += scale · norm(W_out · (norm(o) · sigmoid(G₂ G₁ h))), with h = norm(x) and the results o of the
    heads, for the tokens of `step_args`; the state after them is written to the target slot.
    """
    tokens = step_args.tokens
    scratch = block.scratch + thread * block.scratch_stride
    state, conv_out, output = block.state, block.conv_out, block.output_matrix
    projected, stride = block.projected, block.projected_stride
    decays = state.rows + block.gates_at + block.gate_bytes
    normalize_and_quantize(pool, 0, thread, step_args, block.norm, block.normed)
    ahead, end = first_weights(pool, thread, tokens, block.q_matrix)
    barrier_prefetching(pool, ahead, end)
    project_inputs(pool, thread, block, tokens, scratch)
    barrier(pool)
    quantize_input(pool, 7, step_args, block.low_f)
    quantize_input(pool, 8, step_args, block.low_g)
    barrier_and_clear(pool)
    project(pool, 0, thread, tokens, block.f2_matrix, block.low_f, decays, state.row_stride, scratch)
    project(pool, 1, thread, tokens, block.g2_matrix, block.low_g, block.z, block.z_stride, scratch)
    ahead, end = first_weights(pool, thread, tokens, output)
    ahead = barrier_prefetching(pool, ahead, end)
    convolve(pool, 2, block, step_args)
    ahead = barrier_prefetching(pool, ahead, end)
    recur(pool, 3, block, step_args)
    ahead = barrier_prefetching(pool, ahead, end)
    keep_rows(pool, 4, state, step_args)
    gate_heads(pool, 5, block, tokens)
    barrier_prefetching(pool, ahead, end)
    if block.head_dim % ACTIVATIONS_PER_BLOCK != 0:
        quantize_input(pool, 6, step_args, conv_out)
        barrier_prefetching(pool, ahead, end)
    project(pool, 7, thread, tokens, output, conv_out, projected, stride, scratch)
    barrier_and_clear(pool)
    add_residual(pool, 8, thread, step_args, output, projected, stride, block.post_norm, block.residual_scale)
