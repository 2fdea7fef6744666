"""Kernels that gather the logits of all ranks of tensor parallel, or the largest of them."""

import triton
import triton.language as tl

from edgeinfer_kernels.cuda.decode.sampling import advance, best_of_programs
from edgeinfer_kernels.cuda.tensor.peer_kernels import exchanged
from edgeinfer_kernels.cuda.triton_ops.tiles import release_consumers, wait_for_producers

LOGIT_COLUMNS, LOGIT_WARPS = 1024, 4
"""Columns of a program of `gather_logits_kernel`, and its warps: the programs of a step run all at once."""

FIELDS = tl.constexpr(128)


@triton.jit
def gather_logits_kernel(
    peers, own, logits, firsts,
    VOCABULARY: tl.constexpr, COLUMNS: tl.constexpr, POLLS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """logits (tokens, VOCABULARY) of all ranks; `own` (tokens, rows): those of this one; `firsts`: the first
    row of each, and the end. Program (columns, token).

    Reads 4 bytes of each own logit and 8 of each other's word, sends as many, and writes 4 bytes of each.
    """
    release_consumers(DEPENDENT)
    RANKS: tl.constexpr = len(peers.inboxes)
    PADDED: tl.constexpr = triton.next_power_of_2(RANKS)
    first, token = tl.program_id(0) * COLUMNS, tl.program_id(1)
    sender, column = tl.arange(0, PADDED)[:, None], tl.arange(0, COLUMNS)
    start, rows, own_rows = tl.zeros((PADDED, 1), tl.int32), tl.zeros((PADDED, 1), tl.int32), 0
    for rank in tl.static_range(RANKS):
        start = tl.where(sender == rank, firsts[rank], start)
        rows = tl.where(sender == rank, firsts[rank + 1] - firsts[rank], rows)
        own_rows = tl.where(peers.rank == rank, firsts[rank + 1] - firsts[rank], own_rows)
    inside, all_inside = first + column < own_rows, (first + column)[None, :] < rows
    wait_for_producers(DEPENDENT)
    value = tl.load(own + token * own_rows + first + column, mask=inside, other=0.0)
    bits = exchanged(peers, value.to(tl.int32, bitcast=True), token, first, inside, all_inside, POLLS)
    at = logits + token * VOCABULARY + start + (first + column)[None, :]
    tl.store(at, bits.to(tl.float32, bitcast=True), mask=all_inside)


@triton.jit
def best_of_ranks_kernel(
    peers, best, best_ids, firsts, state, sampled,
    PROGRAMS: tl.constexpr, RING: tl.constexpr, POLLS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """As `sample_best_kernel`, of the logits of all ranks: each sends its largest one and its id.

    The two words are in a row of FIELDS, so that each thread of 8 warps polls another element: if several had
    the same one, they could see it at different times, and leave the loop at different times.
    """
    release_consumers(DEPENDENT)
    wait_for_producers(DEPENDENT)
    top, top_index, broken = best_of_programs(best, PROGRAMS)
    top = tl.where(broken, float("nan"), top)
    own_id = tl.load(best_ids + tl.where(broken, 0, top_index))
    RANKS: tl.constexpr = len(peers.inboxes)
    for rank in tl.static_range(RANKS):
        own_id += tl.where(peers.rank == rank, firsts[rank], 0)
    SENDERS: tl.constexpr = triton.next_power_of_2(RANKS)
    sender, field = tl.arange(0, SENDERS), tl.arange(0, FIELDS)
    own = tl.where(field == 0, top.to(tl.int32, bitcast=True), own_id)
    wanted = (sender < RANKS)[:, None] & (field < 2)[None, :]
    bits = exchanged(peers, own, 0, 0, field < 2, wanted, POLLS)
    tops = tl.sum(tl.where(field[None, :] == 0, bits, 0), axis=1).to(tl.float32, bitcast=True)
    tops = tl.where(sender < RANKS, tops, float("-inf"))
    ids = tl.sum(tl.where(field[None, :] == 1, bits, 0), axis=1)
    broken = tl.max((tops != tops).to(tl.int32), axis=0)
    top, rank = tl.max(tops, axis=0, return_indices=True)
    best_id = tl.sum(tl.where(sender == rank, ids, 0), axis=0)
    advance(state, sampled, tl.where((broken > 0) | (top == float("-inf")), -1, best_id), RING)
