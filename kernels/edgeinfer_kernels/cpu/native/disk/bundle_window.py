"""The window of a layer: slots of main memory with the bundles of neurons that were active recently.

A bundle that a step needs and that has no slot is read into the slot that the clock selects: its hand passes
the slots in turn, decrements their numbers of uses, and stops at the first slot without any.
"""

from edgeinfer_kernels.cpu.native.disk.disk_reader import start_reads, submit_read, wait_for_reads
from edgeinfer_kernels.cpu.native.simd.exports import device_function
from edgeinfer_kernels.cpu.native.simd.float_lanes import add, load_floats, positive_lanes
from edgeinfer_kernels.cpu.native.simd.scalars import (
    load_i32,
    load_i64,
    store_i32,
    store_i64,
    trailing_zeros,
)
from edgeinfer_kernels.cpu.runtime.abi import MAX_SLOT_USES, NEURONS_PER_BLOCK


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
def use_positive(window, row, bias, first):
    """`use_bundle` of a block's neurons whose projection plus bias is above 0; 0: not all have slots."""
    for i in range(first, first + NEURONS_PER_BLOCK, 16):
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
def use_blocks(window, rows, stride, bias, tokens, first, neurons):
    """Hold the bundles of the neurons from `first` on that are positive for one of the tokens; returns the
    first neuron of the block that has no slots any more.
    """
    for block in range(first, neurons, NEURONS_PER_BLOCK):
        for token in range(tokens):
            if use_positive(window, rows + token * stride, bias, block) == 0:
                return block
    return neurons


@device_function
def take_bundles(window, rows, stride, bias, tokens, neurons):
    """Read the bundles of the neurons from `last` on that are positive for one of the tokens, as far as there
    are slots, and wait for them. Sets `first` to the old and `last` to the new end, in whole blocks.
    """
    window.step += 1
    window.first = window.last
    window.last = use_blocks(window, rows, stride, bias, tokens, window.first, neurons)
    start_reads(window.reader)
    wait_for_reads(window.reader, window.finished, window.reads)
