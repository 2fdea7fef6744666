"""Sums over the ranks of tensor parallel for prompts: each rank reads the others' partial sums from their
memory, after these have raised a number in its own.
"""

import triton
import triton.language as tl

MAX_PEER_POLLS = 1 << 30
"""Minutes: a rank may compile kernels first; if one has ended, the model's process ends all."""


@triton.jit
def meet(peers, token, POLLS: tl.constexpr):
    """Raise this rank's number of the token in the memory of the other ranks, and wait for theirs in its own.

    Partial sums that were written before are then visible to the others. After POLLS polls it waits no more.
    """
    RANKS: tl.constexpr = len(peers.arrived)
    number = tl.load(peers.numbers + token) + 1
    tl.debug_barrier()
    tl.store(peers.numbers + token, number)
    for other in tl.static_range(RANKS):
        if other != peers.rank:
            at = peers.arrived[other] + peers.rank * peers.tokens + token
            tl.atomic_xchg(at, number, sem="release", scope="sys")
    for other in tl.static_range(RANKS):
        if other != peers.rank:
            at = peers.arrived_here + other * peers.tokens + token
            seen = tl.atomic_add(at, 0, sem="acquire", scope="sys")
            polls = 0
            while (seen < number) & (polls < POLLS):
                seen = tl.atomic_add(at, 0, sem="acquire", scope="sys")
                polls += 1


@triton.jit
def sum_columns_kernel(
    peers, stride, first, tokens, out,
    COLUMNS: tl.constexpr, BLOCK: tl.constexpr, POLLS: tl.constexpr,
):  # fmt: skip
    """out = Σ scale · row of all ranks, of COLUMNS columns from `first` on; each program takes every n-th of
    the `tokens`. The sums are in the order of the ranks, so that all have the same bits.

    Reads COLUMNS·4 bytes of each rank's row, writes as many.
    """
    RANKS: tl.constexpr = len(peers.rows)
    program = tl.program_id(0)
    meet(peers, program, POLLS)
    for token in range(program, tokens, tl.num_programs(0)):
        for start in range(0, COLUMNS, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < COLUMNS
            at = token * stride + first + column
            value = tl.load(peers.rows[0] + at, mask=inside, other=0.0) * tl.load(peers.scales[0] + token)
            for other in tl.static_range(1, RANKS):
                row = tl.load(peers.rows[other] + at, mask=inside, other=0.0)
                value += row * tl.load(peers.scales[other] + token)
            tl.store(out + at, value, mask=inside)
