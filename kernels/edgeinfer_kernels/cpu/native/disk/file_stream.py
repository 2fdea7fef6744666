"""Blocks whose weights don't fit main memory are read from the file in turn, a few blocks ahead of the step.

The blocks of a model are used in the same order by every step, so the weights of the next ones are read while
this one is computed, and the first ones while a token is sampled or drafted. A step that uses other blocks
discards what was read ahead.
"""

from edgeinfer_kernels.cpu.native.blocks.thread_pool import barrier
from edgeinfer_kernels.cpu.native.disk.disk_reader import start_reads, submit_read, wait_for_reads
from edgeinfer_kernels.cpu.native.simd.exports import Exports, device_function
from edgeinfer_kernels.cpu.runtime.abi import CACHE_LINE, READ_PIECE
from edgeinfer_kernels.cpu.runtime.disk_args import StreamedBlockArgs
from edgeinfer_kernels.cpu.runtime.kernel_args import StepArgs, ThreadPoolArgs

exports = Exports()


@device_function
def submit_block(stream, number):
    """Read the weights of the block with this number, counted over all steps, into its slot."""
    slot = number % stream.slots
    block = StreamedBlockArgs(stream.blocks)[number % stream.count]
    memory, counter = stream.memory + slot * stream.slot_bytes, stream.finished + CACHE_LINE * slot
    submitted = 0
    for index in range(block.part_count):
        part = block.parts[index]
        for done in range(0, part.nbytes, READ_PIECE):
            nbytes = min(READ_PIECE, part.nbytes - done)
            submit_read(stream.reader, memory + part.target + done, nbytes, part.offset + done, counter)
            submitted += 1
    words = stream.wanted[slot]
    words.count += submitted


@device_function
def wait_for_slot(stream, slot):
    """Return when everything that was submitted for a slot is read."""
    wait_for_reads(stream.reader, stream.finished + CACHE_LINE * slot, stream.wanted[slot].count)


@device_function
def read_ahead(stream):
    """Submit the blocks for which there are slots."""
    while stream.submitted < stream.next + stream.slots:
        submit_block(stream, stream.submitted)
        stream.submitted += 1
    start_reads(stream.reader)


@device_function
def restart(stream, index):
    """Let the block `index` be the next one: drop what was read ahead."""
    for slot in range(stream.slots):
        wait_for_slot(stream, slot)
    stream.next = index
    stream.submitted = index


@exports.add("streamed_block_begin", StreamedBlockArgs, StepArgs, ThreadPoolArgs, int)
def streamed_block_begin(block, step_args, pool, thread):
    """Wait for a block's weights, and let its kernels read them."""
    if thread != 0:
        return
    stream = block.stream
    if stream.next % stream.count != block.index:
        restart(stream, block.index)
    read_ahead(stream)
    slot = stream.next % stream.slots
    wait_for_slot(stream, slot)
    for index in range(block.part_count):
        part = block.parts[index]
        rows = part.rows
        rows.source = stream.memory + slot * stream.slot_bytes + part.target + part.skipped


@exports.add("streamed_block_end", StreamedBlockArgs, StepArgs, ThreadPoolArgs, int)
def streamed_block_end(block, step_args, pool, thread):
    """Release a block's weights, and read those of a later block into their slot."""
    barrier(pool, thread)
    if thread != 0:
        return
    stream = block.stream
    stream.next += 1
    read_ahead(stream)
