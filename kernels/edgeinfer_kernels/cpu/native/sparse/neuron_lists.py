"""Lists of neurons whose rows of gate or up are read one by one, and the order in which these are prefetched.

A list is int32, in a thread's memory. Its rows are scattered, so hardware doesn't prefetch them; the kernel
does, some rows ahead. A list is short where many threads share the neurons, so the entries after its last are
the first ones of the next list: memory doesn't wait at its end.
"""

import numpy as np

from edgeinfer_kernels.cpu.native.simd.exports import device_function
from edgeinfer_kernels.cpu.native.simd.float_lanes import (
    add,
    load_floats,
    positive_lanes,
    splat_f32,
    store_floats,
)
from edgeinfer_kernels.cpu.native.simd.scalars import (
    call_pointer_10,
    load_i32,
    prefetch,
    store_i32,
    trailing_zeros,
)
from edgeinfer_kernels.cpu.native.sparse.neuron_rows import row_of
from edgeinfer_kernels.cpu.runtime.abi import CACHE_LINE, MAX_NEURONS_PER_PIECE, ROWS_AHEAD


@device_function
def end_list(neurons, count):
    """No list follows."""
    for ahead in range(ROWS_AHEAD):
        store_i32(neurons + 4 * (count + ahead), -1)


@device_function
def continue_list(neurons, count, following, following_count):
    """The list `following` follows a list: its first rows are prefetched during the last ones of this."""
    for ahead in range(min(ROWS_AHEAD, following_count)):
        store_i32(neurons + 4 * (count + ahead), load_i32(following + 4 * ahead))


@device_function
def list_positive(row, bias, first, last, neurons):
    """List the neurons first…last whose projection plus bias is above 0, as int32; return their number."""
    count = 0
    for i in range(first, last, 16):
        value = load_floats(row + 4 * i)
        if bias != 0:
            value = add(value, load_floats(bias + 4 * i))
        bits = positive_lanes(value)
        while bits != 0:
            store_i32(neurons + 4 * count, i + trailing_zeros(bits))
            bits &= bits - 1
            count += 1
    end_list(neurons, count)
    return count


@device_function
def fill_row(row, first, last, value):
    for i in range(first, last, 16):
        store_floats(row + 4 * i, splat_f32(np.float32(value)))


@device_function
def prefetch_first_rows(rows, weights, neurons, count, already):
    """Prefetch the rows of the first neurons of a list, as far ahead as the kernel prefetches the others,
    except those that a list of `already` neurons before it prefetches. `weights`: of `rows` or of an expert.
    """
    for index in range(min(count, ROWS_AHEAD - already)):
        at = row_of(weights, rows.row_bytes, rows.slots, load_i32(neurons + 4 * index))
        for line in range(0, rows.nbytes, CACHE_LINE):
            prefetch(at + line)


@device_function
def multiply_listed_rows(rows, neurons, count, lanes, out, next_rows):
    """out[n] = row n · x for the listed neurons; the next list has neurons of `next_rows`."""
    call_pointer_10(
        rows.kernel,
        rows.weights,
        rows.groups,
        rows.row_bytes,
        rows.slots,
        neurons,
        count,
        lanes,
        out,
        next_rows.weights,
        next_rows.row_bytes,
    )


@device_function
def list_every(first, last, step, neurons):
    """List first, first + step, … before `last`, at most MAX_NEURONS_PER_PIECE; return the number."""
    count = 0
    for neuron in range(first, last, step):
        if count == MAX_NEURONS_PER_PIECE:
            break
        store_i32(neurons + 4 * count, neuron)
        count += 1
    end_list(neurons, count)
    return count
