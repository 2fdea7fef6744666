"""The window of a layer: slots of main memory with the bundles of neurons that were active recently.

A bundle that a step needs and that has no slot is read into the slot that the clock selects: its hand passes
the slots in turn, decrements their numbers of uses, and stops at the first slot without any.
"""

from edgeinfer_kernels.cpu.native.disk.disk_reader import start_reads, submit_read, wait_for_reads
from edgeinfer_kernels.cpu.native.simd.exports import device_function
from edgeinfer_kernels.cpu.native.simd.float_lanes import add, load_floats, positive_lanes
from edgeinfer_kernels.cpu.native.simd.scalars import (
    atomic_load,
    load_i32,
    load_i64,
    store_i32,
    store_i64,
    trailing_zeros,
)
from edgeinfer_kernels.cpu.runtime.abi import MAX_SLOT_USES


@device_function
def free_slot(window):
    """A slot for another bundle; -1: this step needs all of them."""
    slots, hand, step = window.slot_count, window.hand, window.step
    for _ in range(slots * (MAX_SLOT_USES + 2)):
        hand = hand + 1 if hand + 1 < slots else 0
        if load_i64(window.steps + 8 * hand) == step:
            continue
        uses = load_i32(window.uses + 4 * hand)
        if uses == 0:
            window.hand = hand
            return hand
        store_i32(window.uses + 4 * hand, uses - 1)
    return -1


@device_function
def read_bundle(window, neuron):
    """Read the bundle of a neuron into a slot; 0: there is none for it."""
    slot = free_slot(window)
    if slot < 0:
        return 0
    before = load_i32(window.neurons + 4 * slot)
    if before >= 0:
        store_i32(window.slots + 4 * before, -1)
    store_i32(window.neurons + 4 * slot, neuron)
    store_i32(window.slots + 4 * neuron, slot)
    store_i64(window.steps + 8 * slot, window.step)
    target = window.memory + slot * window.slot_bytes
    offset = window.file_offset + neuron * window.bundle_bytes
    submit_read(window.reader, target, window.slot_bytes, offset, window.finished)
    window.reads += 1
    return 1


@device_function
def use_bundle(window, neuron):
    """Hold the bundle of a neuron in this step; 0: the window has too few slots."""
    slot = load_i32(window.slots + 4 * neuron)
    if slot < 0:
        return read_bundle(window, neuron)
    if load_i64(window.steps + 8 * slot) != window.step:
        store_i64(window.steps + 8 * slot, window.step)
        store_i32(window.uses + 4 * slot, min(MAX_SLOT_USES, load_i32(window.uses + 4 * slot) + 1))
        window.hits += 1
    return 1


@device_function
def use_positive(window, row, bias, neurons):
    """`use_bundle` of every neuron whose projection plus bias is above 0; 0: not all have slots."""
    for i in range(0, neurons, 16):
        value = load_floats(row + 4 * i)
        if bias != 0:
            value = add(value, load_floats(bias + 4 * i))
        bits = positive_lanes(value)
        while bits != 0:
            if use_bundle(window, i + trailing_zeros(bits)) == 0:
                return 0
            bits &= bits - 1
    return 1


@device_function
def take_bundles(window, rows, stride, bias, tokens, neurons):
    """Read the bundles of all neurons that are positive for one of the tokens, and wait for them. Sets
    `is_complete`: whether the window holds them all.
    """
    window.step += 1
    window.is_complete = 1
    for token in range(tokens):
        if use_positive(window, rows + token * stride, bias, neurons) == 0:
            window.is_complete = 0
            break
    start_reads(window.reader)
    wait_for_reads(window.reader, window.finished, window.reads)
    if atomic_load(window.reader.failed) != 0:
        window.is_complete = 0
