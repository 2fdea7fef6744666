"""Reads pieces of a file in separate threads: dozens of reads are in flight, and no Python code runs.

Jobs are numbered. A thread takes the next number and waits until the job with it is submitted, so jobs need
no lock. A job ends with an increment of its counter. One thread of the pool submits jobs and waits for
counters.
"""

from edgeinfer_kernels.cpu.native.blocks.thread_pool import sleep_until_change, wake
from edgeinfer_kernels.cpu.native.simd.exports import Exports, device_function
from edgeinfer_kernels.cpu.native.simd.scalars import atomic_add, atomic_load, atomic_store, call_read
from edgeinfer_kernels.cpu.runtime.abi import READ_JOBS
from edgeinfer_kernels.cpu.runtime.disk_args import DiskReaderArgs

exports = Exports()


@device_function
def wait_until(reader, word, value, sleeping):
    """Return when the word is at least `value`, or negative; returns the word."""
    seen = atomic_load(word)
    while seen >= 0 and seen < value:
        sleep_until_change(reader, word, seen, sleeping)
        seen = atomic_load(word)
    return seen


@device_function
def wait_for_reads(reader, counter, value):
    """Return when the counter is at least `value`; only one thread may wait at a time."""
    atomic_store(reader.awaited, value)
    wait_until(reader, counter, value, reader.waiting)


@device_function
def start_reads(reader):
    """Let the threads read what was submitted."""
    atomic_store(reader.submitted, reader.filled)
    wake(reader, reader.submitted, reader.sleeping)


@device_function
def submit_read(reader, target, nbytes, offset, counter):
    """Read `nbytes` from `offset` of the file to `target`, then increment the word `counter`; reading begins
    at the next `start_reads`, or earlier.
    """
    number = reader.filled
    if number - reader.drained >= READ_JOBS:
        start_reads(reader)
        wait_for_reads(reader, reader.finished, number)
        reader.drained = number
    job = reader.jobs[number % READ_JOBS]
    job.target = target
    job.nbytes = nbytes
    job.offset = offset
    job.counter = counter
    reader.filled = number + 1


@device_function
def read_job(reader, job):
    """Read the bytes of a job up to the end of the file; sets `failed` if they can't be read."""
    target, nbytes, offset = job.target, job.nbytes, job.offset
    while nbytes > 0 and offset < reader.file_bytes:
        count = call_read(reader.read_function, reader.file, target, nbytes, offset)
        if count <= 0:
            atomic_store(reader.failed, 1)
            return
        target += count
        offset += count
        nbytes -= count


@device_function
def count_read(reader, word):
    """Increment a counter, and wake the thread that waits for the value."""
    if atomic_add(word, 1) + 1 >= atomic_load(reader.awaited):
        wake(reader, word, reader.waiting)


@exports.add("read_jobs", DiskReaderArgs)
def read_jobs(reader):
    """The main loop of a thread: reads jobs until `submitted` is negative."""
    while True:
        number = atomic_add(reader.taken, 1)
        if wait_until(reader, reader.submitted, number + 1, reader.sleeping) < 0:
            return
        job = reader.jobs[number % READ_JOBS]
        counter = job.counter
        read_job(reader, job)
        count_read(reader, counter)
        count_read(reader, reader.finished)


@exports.add("stop_reads", DiskReaderArgs)
def stop_reads(reader):
    """Let every thread return from `read_jobs`."""
    atomic_store(reader.submitted, -1)
    wake(reader, reader.submitted, reader.sleeping)
