"""What kernels of all blocks read: the thread pool, steps and schedules, matrices, norms and activations."""

import ctypes
from typing import Annotated, Any

from edgeinfer_kernels.cpu.runtime.abi import CACHE_LINE, WORK_COUNTERS
from edgeinfer_kernels.cpu.runtime.structure import Float, Int, Structure, Word, offset_of, structure


@structure(pitch=CACHE_LINE)
class ThreadPoolArgs(Structure):
    """A thread pool.

    generation: incremented for every run; negative: shutdown. barrier, ended: number of completed barriers,
    and of those that a thread completes; arrivals: an int64 of each thread, one cache line each: this number
    after the barrier at which it has arrived. sleeping, barrier_sleeping, first_sleeping: threads that wait
    in the OS kernel for a run, at a barrier, and whether the first thread waits there for others.
    yield_function, sleep_function, wait_function, wake_function: addresses of C functions. wait_kind: of
    WAIT_KINDS. futex: number of the system call. function, block, step: arguments of the run. counters:
    WORK_COUNTERS, one cache line each.
    """

    generation: Word
    barrier: Word
    ended: Word
    sleeping: Word
    barrier_sleeping: Word
    first_sleeping: Word
    arrivals: Int
    threads: Int
    yield_function: Int
    sleep_function: Int
    sleep_argument: Int
    wait_kind: Int
    wait_function: Int
    wake_function: Int
    futex: Int
    function: Int
    block: Int
    step: Int
    counters: Annotated[Any, ctypes.c_byte * (CACHE_LINE * WORK_COUNTERS)]


@structure()
class TokenArgs(Structure):
    """Position of a token in its sequence, at or after the `start` of the step.

    pages: int64, the cache page of each sixteen positions of the sequence, in units of sixteen. copies: 0, or
    int64 cache positions that also receive its key and value, terminated by -1. recent: 0, or int64, the page
    of recent positions (`recent_pages.py`) of each sixteen positions; read for the token's page and the two
    before.
    """

    position: Int
    pages: Int
    copies: Int
    recent: Int


@structure()
class StepArgs(Structure):
    """Arguments that change per step.

    rope: `rope_dim` float32 per position from `start` on, cosines, then sines. token_args: 0 if token t is at
    position start + t of the only sequence in the cache, else one structure per token. pending, source,
    target: the slots of recurrent states, see `RecurrentStep`. each: 0, or the address of a StepArgs of every
    token, whose recurrent states are different ones: its row is `first`, its state the one with the number
    `state` of a `StatePool`. recent: as of TokenArgs, for steps without these. before: 0, or int64, for each
    token of a tree's step the one before it, -1 for the first one: `recurrent_state.py`.
    """

    x: Int
    x_stride: Int
    tokens: Int
    start: Int
    rope: Int
    token_args: Annotated[int, TokenArgs]
    pending: Int
    source: Int
    target: Int
    each: Int
    first: Int
    state: Int
    recent: Int
    before: Int


STEP_BYTES = ctypes.sizeof(StepArgs)


@structure()
class ScheduleStep(Structure):
    """A step of a schedule: the addresses of a function and of its arguments.

    has_barrier: 0 after the functions in ENDS_BY_TOKEN, in steps of at most STEP_TOKENS.
    """

    function: Int
    block: Int
    step: Int
    has_barrier: Int


@structure()
class ServedStep(Structure):
    """A step that serves a device; awaited, completed: the stage that it waits for or completes, or 0.
    has_barrier: as of ScheduleStep.
    """

    function: Int
    block: Int
    step: Annotated[int, StepArgs]
    has_barrier: Int
    awaited: Int
    completed: Int


@structure(pitch=2 * CACHE_LINE)
class ExchangeWords(Structure):
    """Synchronization flags of a device and its host within a step, whose stages are numbered from 1.

    sent: the last stage for which the device has written hidden states; answered: the last stage whose
    results are written. The data is written before its flag is raised and read after the flag is seen; both
    start at 0. lost, given_up: nonzero after the device or the host, respectively, has timed out and
    continued without the other.
    """

    sent: Word
    answered: Word
    lost: Word
    given_up: Word


EXCHANGE_WORDS = ctypes.sizeof(ExchangeWords) // 8
SENT, ANSWERED, LOST, GIVEN_UP = (
    offset_of(ExchangeWords, name) // 8 for name in ("sent", "answered", "lost", "given_up")
)
"""The indices of its words."""


@structure()
class ServiceArgs(Structure):
    """The service of a schedule; steps: how many it has."""

    words: Annotated[int, ExchangeWords]
    steps: Int


@structure()
class ReadMemoryArgs(Structure):
    """Reads `nbytes`; each thread writes a sum to a cache line of `sums`."""

    nbytes: Int
    sums: Int


@structure()
class LoraArgs(Structure):
    """A LoRA adapter of a matrix, which adds b·(a·x) to its products, in float32.

    a: `columns` of `ranks` rows, b: `rank` columns of the matrix's rows, both interleaved by sixteen rows;
    a_stride, b_stride: bytes between two experts. rank, columns: rounded up to 4, ranks to 16. products: a·x
    of the tokens of a step, `ranks` columns per token, in slots of `slot_bytes`; thread_bytes: those of one
    thread.
    """

    a: Int
    b: Int
    rank: Int
    ranks: Int
    columns: Int
    a_stride: Int
    b_stride: Int
    products: Int
    slot_bytes: Int
    thread_bytes: Int


@structure()
class MatrixArgs(Structure):
    """A matrix.

    kernel: address of the GEMV kernel; tile_kernel: of the AMX kernel, if any. group_bytes: bytes of sixteen
    rows. quantized: 1 if it reads int8 activations or bfloat16 tiles. bias: 0 or float32, padded to 16.
    expert_stride, bias_stride: bytes between the weights and biases of two experts. scale: of the products of
    gate and up. scales: 0, or a float32 factor of the weights of each expert. lora: 0: no adapter.
    """

    kernel: Int
    tile_kernel: Int
    weights: Int
    group_bytes: Int
    rows: Int
    columns: Int
    quantized: Int
    bias: Int
    expert_stride: Int
    bias_stride: Int
    scale: Float
    scales: Int
    lora: Annotated[int, LoraArgs]


@structure()
class FieldArgs(Structure):
    """A field of a block of weights: `count` units of `unit` bytes from `offset` on."""

    offset: Int
    unit: Int
    count: Int


@structure()
class ScaleArgs(Structure):
    """The scales of a block of weights, a field whose NaN and infinite values have all bits of `exponent`."""

    offset: Int
    unit: Int
    count: Int
    exponent: Int


@structure()
class FileRowsArgs(Structure):
    """A memory-mapped matrix.

    kernel: that of its interleaved rows. row_bytes: in the file; ternary: 1 if its rows are TQ1_0, which are
    converted to TQ2_0 first; layout_row_bytes, blocks, block_bytes, fields: of a row in the kernel's format.
    group_offset: offset in a thread's scratch at which 16 or 32 rows are interleaved.
    """

    kernel: Int
    source: Int
    rows: Int
    row_bytes: Int
    ternary: Int
    layout_row_bytes: Int
    blocks: Int
    block_bytes: Int
    fields: Annotated[int, FieldArgs]
    field_count: Int
    group_bytes: Int
    group_offset: Int


@structure()
class NormArgs(Structure):
    """kind 0: none, 1: RMS, 2: LayerNorm, 3: the block reads the normed rows of the one before it; padded:
    width rounded up to 16; weight and bias are zero-padded.
    """

    kind: Int
    epsilon: Float
    weight: Int
    bias: Int
    width: Int
    padded: Int


@structure()
class InputArgs(Structure):
    """Rows of activations as float32 and, if `quantized` is not 0, as int8 blocks; from `tile_tokens` tokens
    on as bfloat16 tiles in the same buffer.

    own: 0, or an InputArgs of each thread, for steps of at most own_tokens tokens, of which every thread
    computes all rows: on the first thread these rows, on others rows of that thread.
    """

    floats: Int
    float_stride: Int
    quantized: Int
    quantized_stride: Int
    columns: Int
    tile_tokens: Int
    own: Int
    own_tokens: Int
