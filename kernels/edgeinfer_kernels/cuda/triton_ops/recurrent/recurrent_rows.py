"""The rows and slots of recurrent states: see `recurrent_state.py`.

`words`: the int32 state of a step, as in `cuda_buffers.py`. Rows of the step's tokens are float32,
(tokens, row width), in a separate buffer until `keep_rows_kernel` writes them to the ring.
"""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from edgeinfer_kernels.cpu.runtime.abi import RING_ROWS
from edgeinfer_kernels.cuda.triton_ops.step_words import (
    MASKS_AT,
    own_row,
    own_words,
    step_pending,
    step_ring,
    step_source,
    step_start,
    step_target,
    step_tokens,
)
from edgeinfer_kernels.cuda.triton_ops.tiles import release_consumers, wait_for_producers
from edgeinfer_kernels.sizes import cuda_buffers

RING = tl.constexpr(RING_ROWS)
PATH_AT = tl.constexpr(cuda_buffers.PATH_AT)
KEPT_COLUMNS = 1024
"""Columns that a program of `keep_rows_kernel` copies."""


class StateArgs(NamedTuple):
    """The ring and the slots of a block."""

    ring: Any
    slots: Any


class StateConfig(NamedTuple):
    """The layout of a recurrent state, as `RecurrentShape`; in elements. is_batch: a step has one token of
    each of several sequences, whose rings and slots are one after the other. is_tree: the tokens of a step
    are a draft tree.
    """

    row_width: int
    tail_rows: int
    tail_width: int
    slot_width: int
    is_batch: bool = False
    is_tree: bool = False


@triton.jit
def earlier_token(words, token, DISTANCE: tl.constexpr, CONFIG: tl.constexpr):
    """The token DISTANCE tokens before one, as `load_row` takes it; of a tree, on its path."""
    if CONFIG.is_tree:
        for _ in tl.static_range(DISTANCE):
            before = tl.load(words + (PATH_AT + 1) + tl.maximum(token, 0)) - 1
            token = tl.where(token >= 0, before, token - 1)
        return token
    else:
        return token - DISTANCE


@triton.jit
def is_on_path(words, node, token, CONFIG: tl.constexpr):
    """Whether a token is `node`, before it in the tree, or pending; without a tree all are."""
    if CONFIG.is_tree:
        path = tl.load(words + MASKS_AT + node)
        return (token < 0) | ((path >> tl.maximum(token, 0)) & 1 == 1)
    else:
        return True


@triton.jit
def load_row(rows, state, words, token, offsets, mask, CONFIG: tl.constexpr):
    """Elements of the row of a token of this step; negative tokens precede it. Before the source slot's
    position only the first `tail_width` elements are there. Zeros before position 0.
    """
    pending = step_pending(words)
    position = step_start(words) + token
    is_here, is_real = token >= 0, position >= 0
    in_ring = (token < 0) & (token >= -pending)
    in_tail = token < -pending
    at = tl.maximum(token, 0).to(tl.int64) * CONFIG.row_width
    value = tl.load(rows + at + offsets, mask=mask & is_here, other=0.0)
    slot = ((position + RING) % RING + step_ring(words)) * CONFIG.row_width
    value += tl.load(state.ring + slot + offsets, mask=mask & in_ring & is_real, other=0.0)
    tail = step_source(words) * CONFIG.slot_width + (token + pending + CONFIG.tail_rows) * CONFIG.tail_width
    return value + tl.load(state.slots + tail + offsets, mask=mask & in_tail & is_real, other=0.0)


@triton.jit
def load_kept_row(rows, state, start, ring, token, offsets, mask, CONFIG: tl.constexpr):
    """As `load_row`, of a token of the step or a pending one; start, ring: `step_start` and `step_ring`."""
    at = tl.maximum(token, 0).to(tl.int64) * CONFIG.row_width
    slot = ((start + token + RING) % RING + ring) * CONFIG.row_width
    value = tl.load(rows + at + offsets, mask=mask & (token >= 0), other=0.0)
    return value + tl.load(state.ring + slot + offsets, mask=mask & (token < 0), other=0.0)


@triton.jit
def matrix_offsets(head, row, column, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Offsets of elements (row, column) of a head's matrix of ROWS rows, sixteen columns after each other;
    COLUMNS: with padding.
    """
    at = head * COLUMNS * ROWS + column // 16 * (16 * ROWS)
    return (at + column % 16)[None, :] + row[:, None] * 16


@triton.jit
def load_slot(state, words, offsets, mask, CONFIG: tl.constexpr):
    """Elements of the source slot; 0 before position 0."""
    is_real = step_start(words) > step_pending(words)
    at = state.slots + step_source(words) * CONFIG.slot_width + offsets
    return tl.load(at, mask=mask & is_real, other=0.0)


@triton.jit
def keep_rows_kernel(
    rows, words, state, count, CONFIG: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr
):  # fmt: skip
    """Write the last rows before the step's end to the target slot, of a tree those before the step, and the
    last RING rows to the ring.

    One program for each row and BLOCK columns: `tail_rows` of the slot, then `count` of the ring; in a batch
    for each sequence. Reads and writes 4 bytes per element.
    """
    release_consumers(DEPENDENT)
    keep_piece(rows, words, state, count, tl.program_id(0), tl.program_id(1), CONFIG, BLOCK, DEPENDENT)


@triton.jit
def keep_piece(
    rows, words, state, count, item, piece, CONFIG: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """Write BLOCK columns of row `item` of those that `keep_rows_kernel` writes."""
    offsets = piece * BLOCK + tl.arange(0, BLOCK)
    words = own_words(words, CONFIG.is_batch)
    rows = own_row(rows, CONFIG.row_width, CONFIG.is_batch)
    tokens = step_tokens(words)
    if item < CONFIG.tail_rows:
        mask = offsets < CONFIG.tail_width
        end = tokens
        if CONFIG.is_tree:
            end = 0
        tail = step_target(words) * CONFIG.slot_width + item * CONFIG.tail_width
        wait_for_producers(DEPENDENT)
        row = load_row(rows, state, words, end - CONFIG.tail_rows + item, offsets, mask, CONFIG)
        tl.store(state.slots + tail + offsets, row, mask=mask)
    else:
        token = tl.maximum(tokens - count, 0) + item - CONFIG.tail_rows
        mask = (offsets < CONFIG.row_width) & (token < tokens)
        slot = ((step_start(words) + token) % RING + step_ring(words)) * CONFIG.row_width
        wait_for_producers(DEPENDENT)
        row = tl.load(rows + token.to(tl.int64) * CONFIG.row_width + offsets, mask=mask, other=0.0)
        tl.store(state.ring + slot + offsets, row, mask=mask)
