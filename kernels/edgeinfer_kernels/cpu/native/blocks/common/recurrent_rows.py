"""The rows and slots of a recurrent state, and inputs between two rows: `recurrent_state.py`."""

import numpy as np

from edgeinfer_kernels.cpu.native.blocks.phases import normalize
from edgeinfer_kernels.cpu.native.blocks.thread_pool import next_item, next_token
from edgeinfer_kernels.cpu.native.gemv.quantize import write_activations
from edgeinfer_kernels.cpu.native.simd.exports import device_function
from edgeinfer_kernels.cpu.native.simd.float_lanes import (
    load_floats,
    multiply,
    multiply_add,
    splat_f32,
    store_floats,
    stream_floats,
    subtract,
)
from edgeinfer_kernels.cpu.native.simd.scalars import load_i64
from edgeinfer_kernels.cpu.native.simd.vector_math import sigmoid
from edgeinfer_kernels.cpu.runtime.abi import RING_ROWS
from edgeinfer_kernels.cpu.runtime.kernel_args import STEP_BYTES, StepArgs


@device_function
def state_count(step_args):
    """Number of sequences of a step, each with its state."""
    return step_args.tokens if step_args.each != 0 else 1


@device_function
def step_of(step_args, token):
    """The step of a token's sequence; `step_args` if all tokens are of one."""
    each = step_args.each
    return StepArgs(each + token * STEP_BYTES if each != 0 else step_args.address)


@device_function
def source_slot(state, step_args):
    """Address of the slot that the step reads."""
    return state.slots + step_args.source * state.slot_bytes


@device_function
def target_slot(state, step_args):
    """Address of the slot that the step writes."""
    return state.slots + step_args.target * state.slot_bytes


@device_function
def row_address(state, step_args, token):
    """Address of the row of a token of this step, which is that of a sequence; tokens below its `first`
    precede it. Before the source slot's position only the first `tail_bytes` are there. 0: the token would
    be before position 0.
    """
    ahead = token - step_args.first
    if ahead >= 0:
        return state.rows + token * state.row_stride
    position = step_args.start + ahead
    if position < 0:
        return 0
    pending = step_args.pending
    if ahead >= -pending:
        return state.ring + (step_args.state * RING_ROWS + position % RING_ROWS) * state.row_bytes
    return source_slot(state, step_args) + (ahead + pending + state.tail_rows) * state.tail_bytes


@device_function
def earlier(step_args, token, distance):
    """The token `distance` tokens before one, as `row_address` takes it; of a tree, on its path."""
    if step_args.before == 0:
        return token - distance
    while token >= 0 and distance > 0:
        token = load_i64(step_args.before + 8 * token)
        distance -= 1
    return token - distance


@device_function
def matrix_before(step_args, columns, token, nbytes):
    """Address of the columns of a matrix that a token of this step updates: `columns`, or of a tree a copy of
    those after the token before it. They follow `columns`, which are those before the tree.
    """
    if step_args.before == 0 or token < 0:
        return columns
    source = columns + (load_i64(step_args.before + 8 * token) + 1) * nbytes
    target = columns + (token + 1) * nbytes
    for at in range(0, nbytes, 64):
        store_floats(target + at, load_floats(source + at))
    return target


@device_function
def row_lanes(row, offset):
    """Sixteen values of a row at a byte offset; zeros if there is no row."""
    if row == 0:
        return splat_f32(np.float32(0))
    return load_floats(row + offset)


@device_function
def load_matrix(state, step_args, offset, target, rows):
    """Copy `rows` rows of sixteen values from the source slot, at a byte offset, to `target`; zeros before
    position 0.
    """
    source = source_slot(state, step_args) + offset
    is_zero = step_args.start == step_args.pending
    for i in range(rows):
        value = splat_f32(np.float32(0)) if is_zero else load_floats(source + 64 * i)
        store_floats(target + 64 * i, value)


@device_function
def store_matrix(state, step_args, offset, source, rows):
    """Copy `rows` rows of sixteen values to the target slot, at a byte offset. They go past the caches: all
    weights are read before the next token reads them.
    """
    target = target_slot(state, step_args) + offset
    for i in range(rows):
        stream_floats(target + 64 * i, load_floats(source + 64 * i))


@device_function
def convolve_lanes(block, step_args, token, offset, value):
    """silu(value + conv) of sixteen channels of a token of this step, at a byte offset of the rows; negative
    tokens precede it.
    """
    state = block.state
    taps = block.taps
    weights = block.tap_weights + offset
    own = step_of(step_args, token)
    for tap in range(taps):
        row = row_address(state, own, earlier(own, token, taps - 1 - tap))
        value = multiply_add(load_floats(weights + tap * state.tail_bytes), row_lanes(row, offset), value)
    return multiply(value, sigmoid(value))


@device_function
def copy_row(source, target, nbytes):
    """Copy a row, or write zeros if there is none."""
    for offset in range(0, nbytes, 64):
        store_floats(target + offset, row_lanes(source, offset))


@device_function
def keep_rows(pool, counter, state, step_args):
    """Phase: write the rows of this step to the ring, for as many last tokens as it has rows, and the last
    ones before the step's end to the target slot; of a tree those before the step.
    """
    states = state_count(step_args)
    tokens = step_args.tokens // states
    row_bytes = state.row_bytes
    tail_rows = state.tail_rows
    tail_bytes = state.tail_bytes
    left_out = max(0, tokens - RING_ROWS)
    items = tail_rows + tokens - left_out
    while True:
        item = next_item(pool, counter)
        if item >= items * states:
            break
        own = step_of(step_args, item // items)
        item = item % items
        first = own.first
        if item < tail_rows:
            end = first + tokens if own.before == 0 else first
            row = row_address(state, own, end - tail_rows + item)
            copy_row(row, target_slot(state, own) + item * tail_bytes, tail_bytes)
        else:
            token = left_out + item - tail_rows
            row = row_address(state, own, first + token)
            at = own.state * RING_ROWS + (own.start + token) % RING_ROWS
            copy_row(row, state.ring + at * row_bytes, row_bytes)


@device_function
def normalize_rows(pool, counter, thread, step_args, norm, state):
    """Phase: norm(x) of every token to its row of the state."""
    tokens = step_args.tokens
    token = thread
    while token < tokens:
        x = step_args.x + token * step_args.x_stride
        normalize(norm, x, row_address(state, step_args, token))
        token = next_token(pool, counter, tokens, token)


@device_function
def mix_piece(state, step_args, lerp, target, token, first, last):
    """h + lerp · (h₋₁ - h) of columns first…last of a token, in the input formats of `target`."""
    row = row_address(state, step_args, token)
    before = row_address(state, step_of(step_args, token), token - 1)
    out = target.floats + token * target.float_stride
    for i in range(first, last, 16):
        h = load_floats(row + 4 * i)
        difference = subtract(row_lanes(before, 4 * i), h)
        store_floats(out + 4 * i, multiply_add(load_floats(lerp + 4 * i), difference, h))
    write_activations(out, target, token, step_args.tokens, first, last)
