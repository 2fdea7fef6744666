"""The kernels of an EAGLE-3 head: the states of its target in a chunk, and pairs of a token and a state."""

import triton
import triton.language as tl

from edgeinfer_kernels.cuda.draft.states.state_kernels import state_row
from edgeinfer_kernels.cuda.prefill.prefill_rows import row_scale, store_scaled
from edgeinfer_kernels.cuda.triton_ops.norm_kernels import load_norm, normalized, normed, whole_row
from edgeinfer_kernels.cuda.triton_ops.tiles import quantize, release_consumers, wait_for_producers


@triton.jit
def eagle_pair_kernel(
    x, states, words, x_norm, state_norm, out,
    NORM: tl.constexpr, STRIDE: tl.constexpr, OWN: tl.constexpr, NORMED_RESIDUAL: tl.constexpr,
    OUT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out = [norm(x); norm(g)] as activations, and x = g, or norm(g) if NORMED_RESIDUAL; one program per
    token of a step. g is a row of `states`, STRIDE elements apart; OWN: that which the words name.

    Reads width · 8 bytes, writes width · 4 and 12 words (44 with floats) per 32 columns. The padding of a row
    stays zero.
    """
    WIDTH: tl.constexpr = NORM.width
    release_consumers(DEPENDENT)
    token = tl.program_id(0)
    group, column, inside = whole_row(NORM)
    x_loaded = load_norm(x_norm, inside, column, False)
    state_loaded = load_norm(state_norm, inside, column, False)
    wait_for_producers(DEPENDENT)
    target = out + token * (OUT.planes * OUT.blocks)
    pointers = x + token * WIDTH + column
    value = tl.load(pointers, mask=inside, other=0.0)
    value = normalized(value, x_loaded, inside, NORM, False)
    quantize(value, target, group, group < WIDTH // 16, OUT)
    row = states + token * STRIDE
    if OWN:
        row = state_row(states, words, token, WIDTH, 1, True)
    state = tl.load(row + column, mask=inside, other=0.0)
    normed_state = normalized(state, state_loaded, inside, NORM, False)
    quantize(normed_state, target, group + WIDTH // 16, group < WIDTH // 16, OUT)
    tl.debug_barrier()  # x has been read.
    if NORMED_RESIDUAL:
        state = normed_state
    tl.store(pointers, state, mask=inside)


@triton.jit
def eagle_state_rows_kernel(
    states, words, norm, out, row_scales,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """As `target_states_kernel`, of a chunk: out (tokens, WIDTH) float16, to be multiplied by row_scales.
    Reads WIDTH · 4 bytes per token, writes WIDTH · 2.
    """
    token = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < WIDTH
    row = state_row(states, words, token, WIDTH, ROWS, False)
    value = tl.load(row + offsets, mask=mask, other=0.0)
    value = normed(value, mask, norm.weight, norm.bias, offsets, norm.epsilon, WIDTH, NORM, False)
    store_scaled(out, row_scales, token, value, offsets, mask, WIDTH)


@triton.jit
def eagle_pair_rows_kernel(
    x, states, state_scales, x_norm, state_norm, out, row_scales,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, NORMED_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """As `eagle_pair_kernel`, of a chunk: g = states · state_scales, out (tokens, 2 · WIDTH) float16, to be
    multiplied by row_scales. Reads WIDTH · 8 bytes per token, writes WIDTH · 8. The scales may be those that
    are overwritten.
    """
    token = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < WIDTH
    at = x + token * WIDTH + offsets
    value = tl.load(at, mask=mask, other=0.0)
    value = normed(value, mask, x_norm.weight, x_norm.bias, offsets, x_norm.epsilon, WIDTH, NORM, False)
    state = tl.load(states + token * WIDTH + offsets, mask=mask, other=0.0) * tl.load(state_scales + token)
    norm = state_norm
    normed_state = normed(state, mask, norm.weight, norm.bias, offsets, norm.epsilon, WIDTH, NORM, False)
    largest = tl.maximum(tl.max(tl.abs(value), axis=0), tl.max(tl.abs(normed_state), axis=0))
    scale = row_scale(largest)
    tl.debug_barrier()  # x and the scale have been read.
    tl.store(row_scales + token, scale)
    own = out + token * (2 * WIDTH) + offsets
    tl.store(own, (value / scale).to(tl.float16), mask=mask)
    tl.store(own + WIDTH, (normed_state / scale).to(tl.float16), mask=mask)
    if NORMED_RESIDUAL:
        state = normed_state
    tl.store(at, state, mask=mask)
