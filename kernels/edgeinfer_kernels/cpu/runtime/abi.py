"""The blocks of memory that Python fills and kernels read: field name -> byte offset.

Every field is an int64 (a count, an address, or a float32 in its low half). Nothing here needs numba, so that
a warm start doesn't import it.
"""

from collections import namedtuple
from typing import Any

CACHE_LINE = 64


def structure(name: str, fields: str, pitch: int = 8) -> Any:
    """A namedtuple of byte offsets, `pitch` apart; numba sees its members as constants."""
    names = fields.split()
    made: Any = namedtuple(name, names)  # type: ignore[misc]  # its fields are known when it is called
    return made(*(pitch * i for i in range(len(names))))


def structure_bytes(offsets: Any) -> int:
    return 8 * len(offsets)


WORK_COUNTERS = 16
TEAM = structure(
    "ThreadPool",
    "generation arrived barrier resting barrier_resting threads yield_function sleep_function sleep_argument "
    "syscall_function futex function block call counters",
    pitch=CACHE_LINE,
)
"""generation: raised by one for every run, negative: the team is dismissed. arrived, barrier: threads that
wait, and how often all have. resting, barrier_resting: threads that wait in the kernel, for a run or at a
barrier. yield_function, sleep_function,
syscall_function: addresses of C functions. futex: number of the system call, or 0. counters: WORK_COUNTERS, a
cache line each.
"""
TEAM_BYTES = TEAM.counters + CACHE_LINE * WORK_COUNTERS

CALL = structure("Call", "x x_stride tokens start rope places")
"""What changes from call to call. rope: `rope_dim` float32 a position from `start` on, cosines, then sines.
places: 0, token t being at position start + t of the one text that the cache holds, or a PLACE a token.
"""
POSITIONS_PER_PAGE = 16
PLACE = structure("Place", "position pages copies")
"""Where a token stands in its text, `start` or behind. pages: int64, where in the cache each sixteen
positions of that text lie, counted in sixteens. copies: 0, or int64, one more position of the cache after the
other that takes its key and value, ended by -1.
"""
PLACE_BYTES = structure_bytes(PLACE)
PROGRAM_STEP_BYTES = 32
"""A step of a program is four int64: the addresses of a function, its block and its call, and whether all
threads meet behind it: 0 behind what ENDS_BY_TOKEN, in steps of STEP_TOKENS at most.
"""
ENDS_BY_TOKEN = ("embed_block", "attention_block", "feed_forward_block", "sparse_feed_forward_block")
"""Functions whose last phase writes a token's x on the thread on which any function's first one reads it."""
SERVED_STEP_BYTES = 40
"""A step that serves a device: those addresses, then the turn that it waits for or 0, the one that it ends
or 0.
"""
SERVICE = structure("Service", "mailbox steps")
"""Whom a program serves: the address of a MAILBOX, and how many steps it has."""
MAILBOX = structure("ExchangeBuffer", "sent answered lost given_up", pitch=2 * CACHE_LINE)
"""What a device and its host tell each other in a step, whose turns are numbered from 1. sent: the turn for
which the device has put rows into the mailbox; answered: the one whose results lie there. Who raises one of
them has written what it stands for, who has seen it may read that; both begin at 0. lost, given_up: not 0
once the device, the host, has waited for so long that it went on without.
"""
MAILBOX_BYTES = 4 * 2 * CACHE_LINE
MATRIX = structure(
    "Matrix", "kernel tile_kernel weights group_bytes rows columns quantized bias expert_stride bias_stride"
)
"""kernel: address of the row kernel; tile_kernel: of that by tiles, where there is one. group_bytes: of
sixteen rows. quantized: 1 if it wants int8 activations, or bfloat16 tiles. bias: 0 or float32, padded to 16.
expert_stride, bias_stride: bytes from one expert's weights and bias to the next one's.
"""
NORM = structure("Norm", "kind epsilon weight bias width padded")
"""kind 0: none, 1: RMS, 2: LayerNorm; `padded`: width rounded up to 16; weight and bias are padded with
zeros.
"""
INPUT = structure("Input", "floats float_stride quantized quantized_stride columns tile_tokens")
"""Rows of activations as float32 and, where `quantized` isn't 0, as int8 blocks; from `tile_tokens` tokens on
as tiles of bfloat16 in the same place.
"""

ATTENTION = structure(
    "Attention",
    "heads kv_heads head_dim padded_head context window scale soft_cap "
    "rope_dim rope_neox qk_norm cache_kind key_cache value_cache key_scales value_scales "
    "norm q_matrix k_matrix v_matrix output_matrix q_norm k_norm post_norm residual_scale "
    "normed mixed queries states projected_q projected_k projected_v projected "
    "q_stride kv_stride query_stride projected_stride scratch scratch_stride sinks",
)
"""qk_norm 0: none, 1: each head, 2: the whole row. cache_kind: one of CACHE_KINDS, the last two with scales.
Strides in bytes per token (scratch: per thread). sinks: 0 or a float32 for each head.
"""
SCALED = 32
"""Elements of a head that share a scale in a cache of bytes, or of four bits each."""
CACHE_KINDS = {"float32": 0, "float16": 1, "int8": 2, "uint8": 3}
"""By numpy's name of an element; uint8 is two of four bits, of rotated heads."""
FEED_FORWARD = structure(
    "FeedForward",
    "norm gate_matrix up_matrix down_matrix post_norm residual_scale activation "
    "normed hidden gate projected projected_stride scratch scratch_stride",
)
"""gate_matrix 0: ungated. `hidden` is an INPUT; `gate` has the rows and stride of its floats."""
NEURON_ROWS = structure("NeuronRows", "kernel weights groups")
"""Rows that are multiplied one by one (see `neuron_layout.py`); `groups` of sixteen blocks a row."""
NEURON_COLUMNS = structure(
    "NeuronColumns",
    "kernel weights blocks block_bytes blocks_a_super super_bytes super_factor_bytes factor_bytes "
    "neuron_bytes outputs",
)
"""A down projection by neurons; lengths in bytes, see `neuron_layout.ColumnLayout`."""
SPARSE_FEED_FORWARD = structure(
    "SparseFeedForward",
    "dense gate_rows up_rows down predictor_first predictor_second predictor_bias predicted rank "
    "neurons_a_piece outputs_a_piece sums sums_stride scratch scratch_stride lanes_stride",
)
"""dense: the FEED_FORWARD. gate_rows, up_rows: NEURON_ROWS, the first (the second where there is no gate)
with a predictor only. predictor_first, predictor_second: MATRIX, or 0; `predicted`: an INPUT of `rank`
columns; predictor_bias: float32 a neuron. sums: rows that down is summed in. scratch: of each thread,
SPARSE_SCRATCH, then SPARSE_TOKENS times the activations by lanes.
"""
EXPERTS = structure(
    "Experts",
    "norm router router_norm router_input early count used gating normalized weight_scale activation "
    "residual_scale scores scores_stride ids ids_stride weights places entries active "
    "normed gathered hidden gate gate_matrix up_matrix down_matrix out out_stride "
    "shared_gate_matrix shared_up_matrix shared_down_matrix shared_hidden shared_gate shared_out "
    "shared_out_stride shared_router pairs_seen pairs_here asked scratch scratch_stride",
)
"""A mixture of experts. `ids` (int64, the best liked expert first) and `weights` (float32) are `used` a
token; a pair is a token with one of its experts, and pair t·used + slot has its activations in row
`places`[pair] of `gathered` (normed rows), of `hidden` with `gate` beside it, and of `out`. Rows of an expert
lie together: `active` is the number of experts in use, then (expert, first row, pairs) int64 for each, and
`entries`[pair] says which of these is the pair's. early: the scores are there already (`route_block`, which
reads x through router_norm into router_input). shared_up_matrix 0: no shared expert; shared_router: 0 or its
float32 vector. Where a device has chosen, `ids` are places among the experts that are here, below 0 for the
others: ELSEWHERE less the expert's number. pairs_seen, pairs_here: how many of either it has asked for;
asked: 0, or the address of how often each of them (int64), by number; for that all must be here.
"""
ELSEWHERE = -1
"""What a device asks for in place of expert 0 where that isn't the host's."""
HEAD = structure("Head", "norm matrix normed logits logits_stride scratch scratch_stride")

EMBED = structure(
    "Embed", "ids decode source row_bytes columns fields field_count scale scratch scratch_stride"
)
"""ids: int64, the rows that are wanted. decode: the kernel of `decode_row.py` for the format of the rows,
which lie `row_bytes` apart from `source` on; fields and scratch are its.
"""
GUESSING = structure(
    "Guessing",
    "program steps embed calls call_count head_call x logits logit_scale choices parts least further "
    "temperature top_k top_p reach candidates weights candidate_counts sorted_logits ids chances "
    "most numbers count going reached passes",
)
"""A loop of guesses. program, steps: a token's embedding, all layers and the head, as `run_program` takes
them; embed: its EMBED. calls: (CALL, bytes a position of its cosines) for each kind of RoPE; head_call:
the head's, whose row is the last of those that are read first; x: that of the only one later. choices:
tokens that may be guessed, the first ones; parts: PART_BYTES for every LOGITS_PER_PART logits. least: for
each of `most` guesses the chance of being reached that it must have, further: that from which another one
is made behind it, float32. temperature 0: the best token is guessed, `chances` are its softmax; else
those among the candidates, which lie at most `reach` below the best logit and are left by top_k (0: all)
and top_p. numbers: 0, or a float32 from 0 to 1 to draw each with. candidates, weights: MAX_CANDIDATES
int64 and float32 a guess. `count` ids with their chances come out, after so many passes. Before: count 0,
going 1, reached 1.0.
"""
GUESS_CALL_BYTES = 16
LOGITS_PER_PART = 1024
PART_BYTES = 16
"""The largest logit and the sum of exponentials below it as float32, then its place as int64."""
MAX_CANDIDATES = 64

FILE_ROWS = structure(
    "FileRows",
    "kernel source rows row_bytes ternary layout_row_bytes blocks block_bytes fields field_count "
    "group_bytes group_offset",
)
"""A matrix as it lies in its file. kernel: that of its interleaved rows. row_bytes: in the file; ternary:
1 if its rows are TQ1_0, which become TQ2_0 first; layout_row_bytes, blocks, block_bytes, fields: of a row in
the kernel's format. group_offset: where in a thread's scratch sixteen rows are interleaved.
"""

SPARSE_TOKENS = 4
"""Steps of so many tokens are sparse; longer ones touch nearly every neuron."""
NEURONS_PER_BLOCK = 32
OUTPUTS_PER_TILE = 128
MAX_NEURONS_PER_PIECE = 512
ROWS_AHEAD, BLOCKS_AHEAD = 8, 3
"""How far ahead weights by neuron are asked for: some kilobytes, as no prefetcher guesses where; measured."""
LIST_BYTES = 4 * (MAX_NEURONS_PER_PIECE + 16)
ACTIVE_BYTES = 512
ACTIVE_LISTS = 4
SPARSE_SCRATCH = LIST_BYTES + ACTIVE_LISTS * ACTIVE_BYTES
"""A thread's list of neurons, and blocks' active neurons: their places and activations."""


def lane_activations_bytes(columns: int) -> int:
    """Bytes of a token's activations with sixteen blocks interleaved."""
    return -(-columns // 512) * 16 * ACTIVATION_BYTES


ACTIVATION_CODES = {"silu": 0, "gelu": 1, "relu": 2, "relu_squared": 3, "clamped_swiglu": 4}
CLAMPED_SWIGLU_SLOPE, CLAMPED_SWIGLU_LIMIT, MIN_WEIGHT_SUM = 1.702, 7.0, 2.0**-14
"""As in `specification.py`; here compiled code is rebuilt when they change."""
GATING_CODES = {"softmax": 0, "sigmoid": 1, "softmax_of_chosen": 2}
TOKEN_TILE = 32
"""Tokens whose sums a row kernel holds at a time."""
TILE_TOKENS = 24
"""From so many tokens on tiles are used where there are any; measured."""
TILE_BYTES = 1024
TILE_STATE_BYTES = 2 * CACHE_LINE + 8 * TILE_BYTES
PANEL_COLUMNS = 1024
PANEL_TOKENS = 256
PANEL_PAIRS = 2
"""What a panel of unpacked weights spans, and how many panels of 32 rows go by while tokens stay near."""
ROWS_SCRATCH = TILE_STATE_BYTES + 64 * PANEL_COLUMNS + 128 * PANEL_TOKENS * PANEL_PAIRS
"""Bytes at the start of a thread's scratch that belong to the row kernels."""
POSITIONS_PER_TILE = 64
"""Positions whose attention scores are held at a time."""
SCORES_BYTES = 4 * POSITIONS_PER_TILE
"""Of one query head with such a tile."""
SCORES_PER_THREAD = 4 * SCORES_BYTES
"""Bytes of the scores of such a tile with four query heads."""
STEP_TOKENS = 16
"""Steps of so many tokens go up all layers in one call, and their attention is cut token by token."""
POSITIONS_PER_PIECE = 256
"""Least positions that are worth a thread of their own."""


def attention_states(group: int, padded_head: int) -> int:
    """Bytes of the running sums of the query heads that share a key head."""
    return group * (CACHE_LINE + 4 * padded_head)


def attention_scratch(group: int, padded_head: int) -> int:
    """A thread's scratch: the row kernels', scores, a key head's states, a tile of keys and values and, for
    those in bytes, their scales and the scores of four heads with two groups' scales.
    """
    tile = 2 * 4 * POSITIONS_PER_TILE * padded_head
    return ROWS_SCRATCH + SCORES_PER_THREAD + attention_states(group, padded_head) + tile


def attention_pieces(threads: int, kv_heads: int) -> int:
    """The most pieces that a step's attention is cut into; see `pieces_of` in `native/attention.py`."""
    return STEP_TOKENS * (4 * threads + kv_heads)


ActivationOffsets = namedtuple("ActivationOffsets", "values scale sum first_sum last_sum")
ACTIVATIONS = ActivationOffsets(0, 32, 36, 40, 44)
"""A block of 32 quantized activations: int8, then float32: their scale, and the sums of all, the first 16
and the last 16 values times the scale.
"""
ACTIVATION_BYTES = 48
ACTIVATIONS_PER_BLOCK = 32


def quantized_bytes(columns: int) -> int:
    """Bytes of one row of activations, as int8 blocks or as its part of bfloat16 tiles, whichever is more."""
    return -(-columns // 32) * max(ACTIVATION_BYTES, TILE_BYTES // 16)
