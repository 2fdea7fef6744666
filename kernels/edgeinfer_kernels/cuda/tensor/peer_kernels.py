"""The sum over the ranks of tensor parallel, in the kernel that adds a block's result to x and normalizes it.

Each rank reads the others' partial sums from their memory, after all have raised a number there.
"""

import triton
import triton.language as tl

from edgeinfer_kernels.cuda.triton_ops.norm_kernels import load_norm, normalized
from edgeinfer_kernels.cuda.triton_ops.tiles import quantize, release_consumers, wait_for_producers


@triton.jit
def _meet(peers, token, POLLS: tl.constexpr):
    """Raise this rank's number of the token in the memory of all ranks, and wait for theirs in its own.

    Partial sums that were written before are then visible to the others. After POLLS polls it waits no more.
    """
    RANKS: tl.constexpr = len(peers.arrived)
    number = tl.load(peers.numbers + token) + 1
    tl.debug_barrier()
    tl.store(peers.numbers + token, number)
    for other in tl.static_range(RANKS):
        at = peers.arrived[other] + peers.rank * peers.tokens + token
        tl.atomic_xchg(at, number, sem="release", scope="sys")
    for other in tl.static_range(RANKS):
        at = peers.arrived_here + other * peers.tokens + token
        seen = tl.atomic_add(at, 0, sem="acquire", scope="sys")
        polls = 0
        while (seen < number) & (polls < POLLS):
            seen = tl.atomic_add(at, 0, sem="acquire", scope="sys")
            polls += 1


@triton.jit
def sum_norm_kernel(
    peers, stride, x, scale, post_norm, norm, out,
    NORM: tl.constexpr, OUT: tl.constexpr, POLLS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """x += scale·post_norm(Σ rows of all ranks), then norm(x) as activations; one program per token, a whole
    row at once. The sums are in the order of the ranks, so that all have the same bits.

    Reads width·4 bytes of each rank's rows and of x, writes x again and 12 words (44 with floats) per 32
    columns. The next sum has other rows: these are written again only after the next one, when all ranks have
    read them.
    """
    WIDTH: tl.constexpr = NORM.width
    BLOCKS: tl.constexpr = OUT.blocks
    RANKS: tl.constexpr = len(peers.rows)
    release_consumers(DEPENDENT)
    token = tl.program_id(0)
    group = tl.arange(0, NORM.groups)
    column = group[:, None] * 16 + tl.arange(0, 16)[None, :]
    inside = column < WIDTH
    if NORM.has_post_norm:
        post_norm_loaded = load_norm(post_norm, inside, column, False)
    if NORM.has_norm:
        norm_loaded = load_norm(norm, inside, column, NORM.has_bias)
    wait_for_producers(DEPENDENT)
    _meet(peers, token, POLLS)
    at = token * stride + column
    value = tl.load(peers.rows[0] + at, mask=inside, other=0.0)
    for other in tl.static_range(1, RANKS):
        value += tl.load(peers.rows[other] + at, mask=inside, other=0.0)
    if NORM.has_post_norm:
        value = normalized(value, post_norm_loaded, inside, NORM, False)
    pointers = x + token * WIDTH + column
    value = tl.load(pointers, mask=inside, other=0.0) + scale * value
    tl.debug_barrier()  # As in `residual_kernel`.
    tl.store(pointers, value, mask=inside)
    if NORM.has_norm:
        value = normalized(value, norm_loaded, inside, NORM, NORM.has_bias)
    target = out + token * (OUT.planes * BLOCKS)
    quantize(value, target, group, group < 2 * BLOCKS, OUT)
