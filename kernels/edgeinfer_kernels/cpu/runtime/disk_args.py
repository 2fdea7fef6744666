"""The arguments of kernels that read weights from a file: the reader, and a layer's window of bundles."""

from typing import Annotated

from edgeinfer_kernels.cpu.runtime.abi import CACHE_LINE
from edgeinfer_kernels.cpu.runtime.kernel_args import FileRowsArgs
from edgeinfer_kernels.cpu.runtime.structure import Int, Structure, Word, structure


@structure()
class ReadJob(Structure):
    """A piece of the file to read to the address `target`; counter: the word that is incremented then."""

    target: Int
    nbytes: Int
    offset: Int
    counter: Int


@structure(pitch=CACHE_LINE)
class DiskReaderArgs(Structure):
    """A reader of a file.

    taken: the next job's number that a thread takes. submitted: jobs that may be read; negative: shutdown.
    finished: jobs that were read. failed: nonzero after a read failed. sleeping, waiting: threads that wait
    in the OS kernel, for a job or for reads. awaited: the value of a counter for which a thread waits.
    file, read_function: its descriptor, and the address of the C function pread. file_bytes: its size when it
    was opened. jobs: READ_JOBS, a ring;
    filled: jobs in it, counted from the start; drained: of these, those that have surely ended. The others:
    see `ThreadPoolArgs`.
    """

    taken: Word
    submitted: Word
    finished: Word
    failed: Word
    sleeping: Word
    waiting: Word
    awaited: Word
    file: Int
    file_bytes: Int
    read_function: Int
    jobs: Annotated[int, ReadJob]
    filled: Int
    drained: Int
    yield_function: Int
    sleep_function: Int
    sleep_argument: Int
    wait_kind: Int
    wait_function: Int
    wake_function: Int
    futex: Int


@structure()
class WantedReads(Structure):
    """The number of reads that were submitted for a slot, since the start."""

    count: Int


@structure()
class StreamedPartArgs(Structure):
    """A matrix of a streamed block: `nbytes` from `offset` of the file, read to `target` in the slot, where
    its rows begin after `skipped` bytes.
    """

    rows: Annotated[int, FileRowsArgs]
    target: Int
    offset: Int
    nbytes: Int
    skipped: Int


@structure()
class FileStreamArgs(Structure):
    """The blocks that are read from the file in turn.

    blocks: the address of `count` StreamedBlockArgs. memory: slots of slot_bytes. next, submitted: the
    numbers, over all steps, of the next block that is used and of the first that isn't submitted. finished:
    of each slot the word that counts its reads, a cache line apart; wanted: how many were submitted.
    """

    reader: Annotated[int, DiskReaderArgs]
    blocks: Int
    count: Int
    slots: Int
    memory: Int
    slot_bytes: Int
    next: Int
    submitted: Int
    finished: Int
    wanted: Annotated[int, WantedReads]


@structure()
class StreamedBlockArgs(Structure):
    """A block whose weights are read from the file by every step; `index`: its number among these."""

    stream: Annotated[int, FileStreamArgs]
    index: Int
    parts: Annotated[int, StreamedPartArgs]
    part_count: Int


@structure()
class BundleWindowArgs(Structure):
    """The bundles of a layer that are in memory; lengths in bytes.

    memory: slot_count slots of slot_bytes, the first bytes of a bundle. file_offset: of neuron 0's bundle.
    slots: the slot of each neuron, -1: none; neurons: the neuron of each slot, -1: none; uses: of each slot,
    for the clock; all int32. steps: the last step that used each slot, int64; step: the number of this one.
    hand: that of the clock. reads, hits: bundles that were read, and found, since the start; finished: reads
    that have ended. first, last: the neurons of this round, whose bundles are all in the window.
    """

    reader: Annotated[int, DiskReaderArgs]
    memory: Int
    slot_count: Int
    slot_bytes: Int
    file_offset: Int
    bundle_bytes: Int
    slots: Int
    neurons: Int
    uses: Int
    steps: Int
    step: Int
    hand: Int
    reads: Int
    hits: Int
    first: Int
    last: Int
    finished: Word
