"""The kernel of a Medusa head's residual layer."""

import triton
import triton.language as tl

from edgeinfer_kernels.cuda.draft.states.state_kernels import state_row
from edgeinfer_kernels.cuda.triton_ops.tiles import quantize, release_consumers, wait_for_producers


@triton.jit
def medusa_hidden_kernel(
    y, states, words, out,
    WIDTH: tl.constexpr, GROUPS: tl.constexpr, ROWS: tl.constexpr, OUT: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """out = h + silu(y) as activations; h: the target's state. One program per GROUPS groups of sixteen
    columns. Reads WIDTH · 8 bytes, writes 12 words (44 with floats) per 32 columns.
    """
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    column = group[:, None] * 16 + tl.arange(0, 16)[None, :]
    inside = column < WIDTH
    value = tl.load(y + column, mask=inside, other=0.0)
    state = tl.load(state_row(states, words, 0, WIDTH, ROWS, False) + column, mask=inside, other=0.0)
    value = state + value / (1.0 + tl.exp(-value))
    quantize(value, out, group, group < 2 * OUT.blocks, OUT)
