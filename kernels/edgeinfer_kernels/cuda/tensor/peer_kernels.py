"""Sums over the ranks of tensor parallel in a step, in the kernel that adds a result to x where it can."""

import triton
import triton.language as tl

from edgeinfer_kernels.cuda.triton_ops.tiles import quantize, release_consumers, wait_for_producers

SUM_COLUMNS, SUM_WARPS = 128, 1
"""Columns of a program, and its warps: the sum of a token has many programs, none of which waits for other
warps.
"""


@triton.jit
def exchanged(peers, own, token, first, inside, wanted, POLLS: tl.constexpr):
    """The columns from `first` on of all ranks, (ranks, columns) int32, padded to a power of two; `own`
    (columns) int32: those of this one, of which those `inside` are sent. `wanted` (ranks, columns): those
    that the other ranks send. After POLLS polls it waits no more.

    Each element is sent as one word with its number, so that it needs no fence and arrives in half a round
    trip. Words alternate between two places; all kernels that use the inboxes divide a token's columns in the
    same way. Word n + 2 can't replace word n too early: a rank sends it after its kernel of n + 1, which has
    received n + 1 of each other rank; that rank has sent it after its kernel of n, which had read n.
    (`wait_for_producers` comes before the call.)
    """
    RANKS: tl.constexpr = len(peers.inboxes)
    COLUMNS: tl.constexpr = own.shape[0]
    size = peers.tokens * peers.columns
    counter = peers.numbers + token * peers.columns + first
    has_columns = first < peers.columns  # else it writes padding of activations
    number = tl.load(counter, mask=has_columns, other=0) + 1
    place = (number & 1) * (RANKS * size) + token * peers.columns + first + tl.arange(0, COLUMNS)
    words = (own.to(tl.int64) & 0xFFFFFFFF) | (number.to(tl.int64) << 32)
    for other in tl.static_range(RANKS):
        target = peers.inboxes[other] + peers.rank * size + place
        tl.store(target, words, mask=inside & (other != peers.rank), cache_modifier=".wt")
    tl.debug_barrier()  # As in `residual_kernel`.
    tl.store(counter, number, mask=has_columns)
    sender = tl.arange(0, wanted.shape[0])[:, None]
    wanted = wanted & (sender < RANKS) & (sender != peers.rank)
    source = peers.inbox_here + sender * size + place[None, :]
    arrived = tl.load(source, mask=wanted, other=0, volatile=True)
    polls = 0
    while (_missing(arrived, number, wanted) > 0) & (polls < POLLS):
        arrived = tl.load(source, mask=wanted, other=0, volatile=True)
        polls += 1
    return tl.where(sender == peers.rank, own[None, :], arrived.to(tl.int32))


@triton.jit
def _missing(words, number, wanted):
    """How many words have another number."""
    late = wanted & ((words >> 32).to(tl.int32) != number)
    return tl.sum(tl.sum(late.to(tl.int32), axis=1), axis=0)


@triton.jit
def summed(peers, own, token, first, inside, POLLS: tl.constexpr):
    """Σ `own` (columns) float32 of all ranks, from column `first` on."""
    PADDED: tl.constexpr = triton.next_power_of_2(len(peers.inboxes))
    wanted = (tl.arange(0, PADDED) >= 0)[:, None] & inside[None, :]
    bits = exchanged(peers, own.to(tl.int32, bitcast=True), token, first, inside, wanted, POLLS)
    return tl.sum(bits.to(tl.float32, bitcast=True), axis=0)


@triton.jit
def sum_residual_kernel(
    peers, y, stride, x, scale, gain, out, sum_squares,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, OUT: tl.constexpr, POLLS: tl.constexpr, GAIN: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """x += scale·Σ y of all ranks (peers None: y); then x·gain as activations, and Σ x² of sixteen columns
    each. Program (columns, token). All ranks have the same bits.

    Per column: reads 4 bytes of y and of x and 8 of each other rank's word, sends as many, and writes x,
    12 words (44 with floats) per 32 columns and 4 bytes per sixteen.
    """
    release_consumers(DEPENDENT)
    GROUPS: tl.constexpr = COLUMNS // 16
    COUNT: tl.constexpr = triton.cdiv(WIDTH, 16)
    program, token = tl.program_id(0), tl.program_id(1)
    column = program * COLUMNS + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    if GAIN:
        factor = tl.load(gain + column, mask=inside, other=0.0)
    wait_for_producers(DEPENDENT)
    value = tl.load(y + token * stride + column, mask=inside, other=0.0)
    pointers = x + token * WIDTH + column
    before = tl.load(pointers, mask=inside, other=0.0)
    if peers is not None:
        value = summed(peers, value, token, program * COLUMNS, inside, POLLS)
    value = before + scale * value
    tl.debug_barrier()  # As in `residual_kernel`.
    tl.store(pointers, value, mask=inside)
    group = program * GROUPS + tl.arange(0, GROUPS)
    squares = tl.sum(tl.reshape(value * value, (GROUPS, 16)), axis=1)
    tl.store(sum_squares + token * COUNT + group, squares, mask=group < COUNT)
    if GAIN:
        value *= factor
    quantize(tl.reshape(value, (GROUPS, 16)), out, group, group < 2 * OUT.blocks, OUT, token)


@triton.jit
def sum_rows_kernel(
    peers, y, stride,
    WIDTH: tl.constexpr, COLUMNS: tl.constexpr, POLLS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """y = Σ y of all ranks, where a norm of whole rows follows. Program (columns, token); traffic as that of
    `sum_residual_kernel`, with 4 bytes written per column.
    """
    release_consumers(DEPENDENT)
    first, token = tl.program_id(0) * COLUMNS, tl.program_id(1)
    column = first + tl.arange(0, COLUMNS)
    inside = column < WIDTH
    wait_for_producers(DEPENDENT)
    pointers = y + token * stride + column
    own = tl.load(pointers, mask=inside, other=0.0)
    value = summed(peers, own, token, first, inside, POLLS)
    tl.debug_barrier()  # As in `residual_kernel`.
    tl.store(pointers, value, mask=inside)
