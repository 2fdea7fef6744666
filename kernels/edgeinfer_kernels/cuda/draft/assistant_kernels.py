"""The kernel that makes the input of a Gemma 4 assistant: a token's embedding and a hidden state."""

import triton
import triton.language as tl

from edgeinfer_kernels.cuda.draft.states.state_kernels import state_row
from edgeinfer_kernels.cuda.triton_ops.embedding_kernels import embedded
from edgeinfer_kernels.cuda.triton_ops.tiles import quantize, release_consumers, wait_for_producers


@triton.jit
def assistant_pair_kernel(
    embedding, x, states, words, scale, out,
    WIDTH: tl.constexpr, OWN_WIDTH: tl.constexpr, IN_BLOCKS: tl.constexpr, ROWS: tl.constexpr,
    OWN: tl.constexpr, OUT: tl.constexpr, TILE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out = [embedding row · scale; state] as activations, and x (OWN_WIDTH) = 0, to which the projection is
    added; program (256 columns, token). WIDTH: of the target. The state is that of the target in its ring;
    OWN: the row of the token.

    Reads a row's planes and WIDTH · 4 bytes per token, writes 24 words (88 with floats) per 32 columns and
    OWN_WIDTH · 4 bytes. The padding of a row stays zero.
    """
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    chunk, token = tl.program_id(0), tl.program_id(1)
    group = chunk * 16 + tl.arange(0, 16)
    column = group[:, None] * 16 + tl.arange(0, 16)[None, :]
    inside, used = column < WIDTH, group < WIDTH // 16
    target = out + token * (OUT.planes * OUT.blocks)
    value = embedded(embedding, tl.load(words + token), column, WIDTH, IN_BLOCKS, TILE) * scale
    quantize(value, target, group, used, OUT)
    if OWN:
        row = states  # A step of one token.
    else:
        row = state_row(states, words, token, WIDTH, ROWS, False)
    state = tl.load(row + column, mask=inside, other=0.0)
    quantize(state, target, group + WIDTH // 16, used, OUT)
    tl.store(x + token * OWN_WIDTH + column, tl.zeros_like(state), mask=column < OWN_WIDTH)
