"""Constants that Python and the compiled code share: codes, sizes and layouts of memory.

This module does not need numba, so a warm start does not import numba.
"""

from collections import namedtuple

CACHE_LINE = 64
WORK_COUNTERS = 16
WAIT_KINDS = {"sleep": 0, "futex": 1, "windows": 2, "macos": 3}
"""How a thread waits until a word of memory changes: in short sleeps, or by a call of the system."""
POSITIONS_PER_PAGE = 16
RECENT_PAGES = 3
"""Pages that a token reads in f16 if its cache has recent positions: its own and the two before."""
SCALED = 32
"""Elements of a head that share a scale in an 8-bit or 4-bit cache."""
CACHE_KINDS = {"f32": 0, "f16": 1, "q8_0": 2, "q4_0": 3, "fp8": 4}
"""By the type of the elements of a cache (`ElementType`)."""
ELSEWHERE = -1
"""Id that a device writes for expert 0 if the host does not have it."""
SHARED_INPUT = 3
"""The kind of a norm that isn't computed: its block reads the normed rows of the block before it."""
RING_ROWS = 64
"""Recent positions whose rows a recurrent block keeps: `recurrent_state.py`."""
LOGITS_PER_PART = 1024
MAX_CANDIDATES = 64
MAX_DRAFT_TOKENS = 16
"""Of one draft, and tokens that are evaluated before it."""
MAX_DRAFT_CYCLES = 16
"""Drafts of one run, each with the step that verifies it."""

SPARSE_TOKENS = 4
"""Maximum tokens of a sparse step; more tokens activate nearly every neuron."""
NEURONS_PER_BLOCK = 32
OUTPUTS_PER_TILE = 128
MAX_NEURONS_PER_PIECE = 512
ROWS_AHEAD, BLOCKS_AHEAD = 4, 3
"""Prefetch distance of weights in the per-neuron layout: some kilobytes, because hardware prefetchers cannot
predict the addresses; measured. A thread that reads all outputs of a block prefetches one block.
"""
LIST_BYTES = 4 * (MAX_NEURONS_PER_PIECE + 16)
LISTS_BYTES = 2 * LIST_BYTES
ACTIVE_BYTES = 512
ACTIVE_LISTS = 4
MAX_SUM_PARTS = 256
"""Threads that sum a down projection by neurons; further ones have no part."""
SUMS_SCRATCH = ACTIVE_LISTS * ACTIVE_BYTES + 8 * MAX_SUM_PARTS
SPARSE_SCRATCH = LISTS_BYTES + SUMS_SCRATCH
"""A thread's lists of neurons; the active neurons of blocks: their indices and activations; the bytes of each
part of the blocks.
"""


READ_JOBS = 8192
"""Reads of a file that can be submitted before the first has ended."""
READ_PIECE = 1 << 20
"""Bytes that a thread reads at a time of weights that are read in order."""
MAX_SLOT_USES = 15
"""Uses of a window's slot that are counted: it is passed over as often before another bundle is read into it.
"""


def lane_activations_bytes(columns: int) -> int:
    """Bytes of a token's activations with sixteen blocks interleaved."""
    return -(-columns // 512) * 16 * ACTIVATION_BYTES


ACTIVATION_CODES = {"silu": 0, "gelu": 1, "relu": 2, "relu_squared": 3, "clamped_swiglu": 4, "drelu": 5}
CLAMPED_SWIGLU_SLOPE, CLAMPED_SWIGLU_LIMIT, MIN_WEIGHT_SUM = 1.702, 7.0, 2.0**-14
"""As in `specification.py`; defined here so that compiled code is rebuilt when they change."""
GATING_CODES = {"softmax": 0, "sigmoid": 1, "softmax_of_selected": 2}
FEW_TOKENS = 8
"""Maximum number of tokens that are processed group by group, in the L1 cache, with their sums in registers,
by a target with 32 of 64 bytes.
"""
TOKEN_TILE = 32
"""Tokens whose sums a GEMV kernel holds at a time."""
TILE_TOKENS = 24
"""Minimum number of tokens for AMX tiles, if available; measured."""
TILE_BYTES = 1024
TILE_STATE_BYTES = 2 * CACHE_LINE + 8 * TILE_BYTES
PANEL_COLUMNS = 1024
PANEL_TOKENS = 256
PANEL_PAIRS = 2
"""Width of a panel of unpacked weights, and how many panels of 32 rows are processed while the tokens stay in
cache.
"""
ROWS_SCRATCH = TILE_STATE_BYTES + 64 * PANEL_COLUMNS + 128 * PANEL_TOKENS * PANEL_PAIRS
"""Bytes at the start of a thread's scratch that are reserved for the GEMV kernels."""
POSITIONS_PER_TILE = 64
"""Positions whose attention scores are held at a time."""
SCORES_BYTES = 4 * POSITIONS_PER_TILE
"""Bytes of the scores of one query head for such a tile."""
SCORES_PER_THREAD = 4 * SCORES_BYTES
"""Bytes of the scores of four query heads for such a tile."""
STEP_TOKENS = 16
"""Maximum tokens of a step that runs all layers in one call and splits its attention by token."""
LATENT_PIECES_PER_THREAD, LATENT_POSITIONS_PER_PIECE = 1, 64
"""As PIECES_PER_THREAD and POSITIONS_PER_PIECE, for latent attention, which computes all heads together."""
POSITIONS_PER_PIECE = 256
"""Minimum positions of a KV split: fewer do not justify a thread."""
PIECES_PER_THREAD = 4
"""Maximum number of KV splits for each thread."""


def attention_states(group: int, padded_head: int) -> int:
    """Bytes of the running sums of the query heads that share a key head."""
    return group * (CACHE_LINE + 4 * padded_head)


def attention_scratch(group: int, padded_head: int) -> int:
    """Bytes of a thread's scratch: that of the GEMV kernels, scores, the states of a key head, a tile of keys
    and values and, for quantized caches, their scales and the scores of four heads with the scales of two
    groups.
    """
    tile = 2 * 4 * POSITIONS_PER_TILE * padded_head
    return ROWS_SCRATCH + SCORES_PER_THREAD + attention_states(group, padded_head) + tile


ENCODER_QUERIES, ENCODER_KEYS = 4, 256
"""Queries of an encoder whose scores are held at a time, and the keys of a tile of them."""


def encoder_scratch(padded_head: int) -> int:
    """Bytes of a thread's scratch: that of the GEMV kernels, the scores of a tile, and the running sums."""
    return ROWS_SCRATCH + ENCODER_QUERIES * (CACHE_LINE + 4 * (ENCODER_KEYS + padded_head))


def attention_pieces(threads: int, kv_heads: int, pieces_per_thread: int = PIECES_PER_THREAD) -> int:
    """Maximum number of KV splits of a step's attention; see `pieces_of` in `native/attention.py`."""
    return STEP_TOKENS * (pieces_per_thread * threads + kv_heads)


ActivationOffsets = namedtuple("ActivationOffsets", "values scale sum first_sum last_sum starts")
ACTIVATIONS = ActivationOffsets(0, 32, 36, 40, 44, 48)
"""A block of 32 quantized activations: int8; then float32: their scale, and the sums of all, of the first 16
and of the last 16 values times the scale; then the int32 of STARTS.
"""
STARTS = ("all", 128), ("all", 8), ("first", 32), ("last", 32)
"""(columns, offset): minus the offset times the sum of these values of a block. The dot product with weights
that are stored with the offset starts from it. 128 is that of signed weights as VNNI takes them, 8 that of
Q4_0 and 32 that of Q6_K; others cost an instruction or two.
"""
ACTIVATION_BYTES = 64
ACTIVATIONS_PER_BLOCK = 32


def quantized_bytes(columns: int) -> int:
    """Bytes of one row of activations: the maximum of int8 blocks and its part of bfloat16 tiles."""
    return -(-columns // 32) * max(ACTIVATION_BYTES, TILE_BYTES // 16)
