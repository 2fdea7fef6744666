"""The kernels of hidden states for draft heads: a target keeps them, and a head reads them with a token.

The target keeps the states of its last positions after the final norm, or those after some layers side by
side: that of position p is row p % ROWS of a ring. A head's position 0 is the ring's row `STATES_AT` of its
words. After a draft token it reads its own states, which it has kept in a buffer: row 0 is the last one,
1 + r that of row r of a tree's step.
"""

import triton
import triton.language as tl

from edgeinfer_kernels.cuda.prefill.prefill_rows import row_scale
from edgeinfer_kernels.cuda.triton_ops.norm_kernels import load_norm, normalized, normed, whole_row
from edgeinfer_kernels.cuda.triton_ops.step_words import step_start, step_tokens
from edgeinfer_kernels.cuda.triton_ops.tiles import quantize, release_consumers, wait_for_producers
from edgeinfer_kernels.sizes import cuda_buffers

STATES_AT = tl.constexpr(cuda_buffers.STATES_AT)
PATH_AT = tl.constexpr(cuda_buffers.PATH_AT)
BY_POSITION = tl.constexpr(0)
LAST = tl.constexpr(1)
BY_ROW = tl.constexpr(2)
"""Where states are kept: in the rows of their positions in a ring, the last one in row 0, in rows from 1 on.
"""


@triton.jit
def keep_states_kernel(
    x, words, norm, kept,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, BIAS: tl.constexpr, ROWS: tl.constexpr,
    STRIDE: tl.constexpr, PLACE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """kept = norm(x) of a step or a chunk, without padding; one program per token, with LAST a single one.
    Rows of `kept` are STRIDE elements apart. Reads and writes WIDTH · 4 bytes per token.
    """
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    token, count = tl.program_id(0), step_tokens(words)
    row = (step_start(words) + token) % ROWS
    if PLACE == LAST:
        token, row = count - 1, 0
    if PLACE == BY_ROW:
        row = 1 + token
    offsets = tl.arange(0, BLOCK)
    mask = (offsets < WIDTH) & (token < count)
    value = tl.load(x + token.to(tl.int64) * WIDTH + offsets, mask=mask, other=0.0)
    value = normed(value, mask, norm.weight, norm.bias, offsets, norm.epsilon, WIDTH, NORM, BIAS)
    tl.store(kept + row * STRIDE + offsets, value, mask=mask)


@triton.jit
def state_row(states, words, token, WIDTH: tl.constexpr, ROWS: tl.constexpr, OWN: tl.constexpr):
    """The state that belongs to a token of a step or a chunk; OWN: of the head."""
    if OWN:
        row = tl.load(words + (PATH_AT + 1) + token)
    else:
        row = (tl.load(words + STATES_AT) + step_start(words) + token) % ROWS
    return states + row.to(tl.int64) * WIDTH


@triton.jit
def target_states_kernel(
    states, words, norm, out,
    NORM: tl.constexpr, ROWS: tl.constexpr, OUT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out = the target's states, normalized if NORM.has_norm, as activations; program (token, piece of
    NORM.groups groups). With a norm the piece is the whole row.

    Reads width · 4 bytes per token, writes 12 words (44 with floats) per 32 columns.
    """
    WIDTH: tl.constexpr = NORM.width
    release_consumers(DEPENDENT)
    token = tl.program_id(0)
    group = tl.program_id(1) * NORM.groups + tl.arange(0, NORM.groups)
    column = group[:, None] * 16 + tl.arange(0, 16)[None, :]
    inside = column < WIDTH
    if NORM.has_norm:
        loaded = load_norm(norm, inside, column, False)
    wait_for_producers(DEPENDENT)
    row = state_row(states, words, token, WIDTH, ROWS, False)
    value = tl.load(row + column, mask=inside, other=0.0)
    if NORM.has_norm:
        value = normalized(value, loaded, inside, NORM, False)
    quantize(value, out + token * (OUT.planes * OUT.blocks), group, group < 2 * OUT.blocks, OUT)


@triton.jit
def draft_pair_kernel(
    x, states, words, x_norm, state_norm, out,
    NORM: tl.constexpr, ROWS: tl.constexpr, OWN: tl.constexpr, OUT: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out = [norm(x); norm(state)] as activations, and x = 0, to which the projection is added; one program
    per token of a step.

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
    tl.debug_barrier()
    tl.store(pointers, tl.zeros_like(value), mask=inside)
    value = normalized(value, x_loaded, inside, NORM, False)
    quantize(value, target, group, group < WIDTH // 16, OUT)
    state = tl.load(state_row(states, words, token, WIDTH, ROWS, OWN) + column, mask=inside, other=0.0)
    state = normalized(state, state_loaded, inside, NORM, False)
    quantize(state, target, group + WIDTH // 16, group < WIDTH // 16, OUT)


@triton.jit
def draft_pair_rows_kernel(
    x, states, words, x_norm, state_norm, out, row_scales,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, NORM: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """As `draft_pair_kernel`, of a chunk: out (tokens, 2 · WIDTH) float16, to be multiplied by row_scales.
    Reads WIDTH · 8 bytes per token, writes WIDTH · 8.
    """
    token = tl.program_id(0).to(tl.int64)
    offsets = tl.arange(0, BLOCK)
    mask = offsets < WIDTH
    at = x + token * WIDTH + offsets
    value = tl.load(at, mask=mask, other=0.0)
    value = normed(value, mask, x_norm.weight, x_norm.bias, offsets, x_norm.epsilon, WIDTH, NORM, False)
    state = tl.load(state_row(states, words, token, WIDTH, ROWS, False) + offsets, mask=mask, other=0.0)
    norm = state_norm
    state = normed(state, mask, norm.weight, norm.bias, offsets, norm.epsilon, WIDTH, NORM, False)
    tl.store(at, tl.zeros_like(value), mask=mask)
    largest = tl.maximum(tl.max(tl.abs(value), axis=0), tl.max(tl.abs(state), axis=0))
    scale = row_scale(largest)
    tl.store(row_scales + token, scale)
    own = out + token * (2 * WIDTH) + offsets
    tl.store(own, (value / scale).to(tl.float16), mask=mask)
    tl.store(own + WIDTH, (state / scale).to(tl.float16), mask=mask)
