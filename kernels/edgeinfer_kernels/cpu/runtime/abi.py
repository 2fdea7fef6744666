"""Structures that Python fills and kernels read: field name -> byte offset.

Every field is an int64 (a count, an address, or a float32 in its low 32 bits). This module does not need
numba, so a warm start does not import numba.
"""

from collections import namedtuple
from typing import Any

CACHE_LINE = 64


def structure(name: str, fields: str, pitch: int = 8) -> Any:
    """A namedtuple of byte offsets, `pitch` bytes apart; numba treats its members as constants."""
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
"""generation: incremented for every run; negative: shutdown. arrived, barrier: number of threads at the
barrier, and number of completed barriers. resting, barrier_resting: threads that wait in the OS kernel, for a
run or at a barrier. yield_function, sleep_function, syscall_function: addresses of C functions. futex: number
of the system call, or 0. counters: WORK_COUNTERS, one cache line each.
"""
TEAM_BYTES = TEAM.counters + CACHE_LINE * WORK_COUNTERS

CALL = structure("Call", "x x_stride tokens start rope places")
"""Arguments that change per call. rope: `rope_dim` float32 per position from `start` on, cosines, then sines.
places: 0 if token t is at position start + t of the only sequence in the cache, else the address of a PLACE
per token.
"""
POSITIONS_PER_PAGE = 16
PLACE = structure("Place", "position pages copies")
"""Position of a token in its sequence, at or after `start`. pages: int64, the cache page of each sixteen
positions of the sequence, in units of sixteen. copies: 0, or int64 cache positions that also receive its key
and value, terminated by -1.
"""
PLACE_BYTES = structure_bytes(PLACE)
PROGRAM_STEP_BYTES = 32
"""A step of a schedule is four int64: the addresses of a function, its block and its call, and a barrier
flag. In steps of at most STEP_TOKENS the flag is 0 after a kernel whose last phase writes a token's x on the
thread that reads it in the first phase of the next kernel.
"""
SERVED_STEP_BYTES = 40
"""A step that serves a device: those addresses, then the stage that it waits for or 0, and the stage that it
completes or 0.
"""
SERVICE = structure("Service", "mailbox steps")
"""The service of a schedule: the address of a MAILBOX, and the number of steps."""
MAILBOX = structure("ExchangeBuffer", "sent answered lost given_up", pitch=2 * CACHE_LINE)
"""Synchronization flags of a device and its host within a step, whose stages are numbered from 1. sent: the
last stage for which the device has written hidden states; answered: the last stage whose results are written.
The data is written before its flag is raised and read after the flag is seen; both start at 0. lost,
given_up: nonzero after the device or the host, respectively, has timed out and continued without the other.
"""
MAILBOX_BYTES = 4 * 2 * CACHE_LINE
MATRIX = structure(
    "Matrix", "kernel tile_kernel weights group_bytes rows columns quantized bias expert_stride bias_stride"
)
"""kernel: address of the GEMV kernel; tile_kernel: of the AMX kernel, if any. group_bytes: bytes of sixteen
rows. quantized: 1 if it reads int8 activations or bfloat16 tiles. bias: 0 or float32, padded to 16.
expert_stride, bias_stride: bytes between the weights and biases of two experts.
"""
NORM = structure("Norm", "kind epsilon weight bias width padded")
"""kind 0: none, 1: RMS, 2: LayerNorm; `padded`: width rounded up to 16; weight and bias are zero-padded."""
INPUT = structure("Input", "floats float_stride quantized quantized_stride columns tile_tokens")
"""Rows of activations as float32 and, if `quantized` is not 0, as int8 blocks; from `tile_tokens` tokens on
as bfloat16 tiles in the same buffer.
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
"""Elements of a head that share a scale in an 8-bit or 4-bit cache."""
CACHE_KINDS = {"float32": 0, "float16": 1, "int8": 2, "uint8": 3}
"""By numpy dtype name of an element; uint8 holds two 4-bit codes of heads in the Hadamard basis."""
FEED_FORWARD = structure(
    "FeedForward",
    "norm gate_matrix up_matrix down_matrix post_norm residual_scale activation "
    "normed hidden gate projected projected_stride scratch scratch_stride",
)
"""gate_matrix 0: no gate. `hidden` is an INPUT; `gate` has the same rows and stride as its floats."""
NEURON_ROWS = structure("NeuronRows", "kernel weights groups")
"""Rows that are multiplied one by one (see `neuron_layout.py`); `groups` of sixteen blocks per row."""
NEURON_COLUMNS = structure(
    "NeuronColumns",
    "kernel weights blocks block_bytes blocks_a_super super_bytes super_factor_bytes factor_bytes "
    "neuron_bytes outputs",
)
"""A down projection in the per-neuron layout; lengths in bytes, see `neuron_layout.ColumnLayout`."""
SPARSE_FEED_FORWARD = structure(
    "SparseFeedForward",
    "dense gate_rows up_rows down predictor_first predictor_second predictor_bias predicted rank "
    "neurons_a_piece outputs_a_piece sums sums_stride scratch scratch_stride lanes_stride",
)
"""dense: the FEED_FORWARD. gate_rows, up_rows: NEURON_ROWS; the first (the second without a gate) only with a
predictor. predictor_first, predictor_second: MATRIX, or 0; `predicted`: an INPUT of `rank` columns;
predictor_bias: float32 per neuron. sums: rows in which down is accumulated. scratch: per thread,
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
"""An MoE block. `ids` (int64, highest score first) and `weights` (float32) have `used` entries per token. A
pair is a token-expert assignment. Pair t·used + slot has its activations in row `places`[pair] of `gathered`
(normed rows), of `hidden` and `gate`, and of `out`. The rows of an expert are contiguous: `active` is the
number of experts in use, then (expert, first row, pairs) int64 for each; `entries`[pair] is the index into
these. early: the scores are already computed (`route_block`, which reads x through router_norm into
router_input). shared_up_matrix 0: no shared expert; shared_router: 0 or its float32 vector. If a device
selects the experts, `ids` are indices among the experts on this host, negative for others: ELSEWHERE minus
the expert number. pairs_seen, pairs_here: how many assignments the device has made in total, and of experts
on this host. asked: 0, or the address of the request counts (int64) by expert number; this needs all experts
on the host.
"""
ELSEWHERE = -1
"""Id that a device writes for expert 0 if the host does not have it."""
SHORT_CONVOLUTION = structure(
    "ShortConvolution",
    "norm b_matrix c_matrix x_matrix output_matrix post_norm residual_scale normed mixed b c x row_stride "
    "channels taps weights ring checkpoints row_bytes checkpoint_count projected projected_stride "
    "scratch scratch_stride",
)
"""weights: float32 of each tap, rows of `row_bytes`. ring, checkpoints: rows of the same size, as in
`recent_rows.py`. row_stride: bytes per token of b, c and x.
"""
RING_ROWS, CHECKPOINT_POSITIONS = 64, 256
"""As in `recent_rows.py`; defined here so that compiled code is rebuilt when they change."""
HEAD = structure("Head", "norm matrix normed logits logits_stride scratch scratch_stride")

EMBED = structure(
    "Embed", "ids decode source row_bytes columns fields field_count scale scratch scratch_stride"
)
"""ids: int64, the requested rows. decode: the kernel of `decode_row.py` for the format of the rows, which are
`row_bytes` apart from `source` on; fields and scratch are its arguments.
"""
GUESSING = structure(
    "Guessing",
    "program steps embed calls call_count head_call x logits logit_scale choices parts least further "
    "temperature top_k top_p reach candidates weights candidate_counts sorted_logits ids chances "
    "most numbers count going reached passes",
)
"""A draft loop. program, steps: a token's embedding, all layers and the head, as `run_program` takes them;
embed: its EMBED. calls: (CALL, bytes of cosines per position) for each kind of RoPE; head_call: that of the
head, which reads the last of the given tokens' rows first; x: the row of a single token afterwards. choices:
only token ids below this may be drafted; parts: PART_BYTES for every LOGITS_PER_PART logits. least: for each
of `most` draft tokens the minimum cumulative probability; further: the minimum for another token after it,
float32. temperature 0: the argmax is drafted, and `chances` are its softmax. Otherwise the token is sampled
from the candidates, which are at most `reach` below the largest logit and are filtered by top_k (0: off) and
top_p. numbers: 0, or a float32 uniform number in [0, 1) for each sample. candidates, weights: MAX_CANDIDATES
int64 and float32 per draft token. The outputs are `count` ids with their probabilities and the number of
forwards. Initial values: count 0, going 1, reached 1.0.
"""
GUESS_CALL_BYTES = 16
LOGITS_PER_PART = 1024
PART_BYTES = 16
"""The largest logit and the sum of exponentials relative to it as float32, then its index as int64."""
MAX_CANDIDATES = 64

FILE_ROWS = structure(
    "FileRows",
    "kernel source rows row_bytes ternary layout_row_bytes blocks block_bytes fields field_count "
    "group_bytes group_offset",
)
"""A memory-mapped matrix. kernel: that of its interleaved rows. row_bytes: in the file; ternary: 1 if its
rows are TQ1_0, which are converted to TQ2_0 first; layout_row_bytes, blocks, block_bytes, fields: of a row in
the kernel's format. group_offset: offset in a thread's scratch at which sixteen rows are interleaved.
"""

SPARSE_TOKENS = 4
"""Maximum tokens of a sparse step; more tokens activate nearly every neuron."""
NEURONS_PER_BLOCK = 32
OUTPUTS_PER_TILE = 128
MAX_NEURONS_PER_PIECE = 512
ROWS_AHEAD, BLOCKS_AHEAD = 8, 3
"""Prefetch distance of weights in the per-neuron layout: some kilobytes, because hardware prefetchers cannot
predict the addresses; measured.
"""
LIST_BYTES = 4 * (MAX_NEURONS_PER_PIECE + 16)
ACTIVE_BYTES = 512
ACTIVE_LISTS = 4
SPARSE_SCRATCH = LIST_BYTES + ACTIVE_LISTS * ACTIVE_BYTES
"""A thread's list of neurons, and the active neurons of blocks: their indices and activations."""


def lane_activations_bytes(columns: int) -> int:
    """Bytes of a token's activations with sixteen blocks interleaved."""
    return -(-columns // 512) * 16 * ACTIVATION_BYTES


ACTIVATION_CODES = {"silu": 0, "gelu": 1, "relu": 2, "relu_squared": 3, "clamped_swiglu": 4}
CLAMPED_SWIGLU_SLOPE, CLAMPED_SWIGLU_LIMIT, MIN_WEIGHT_SUM = 1.702, 7.0, 2.0**-14
"""As in `specification.py`; defined here so that compiled code is rebuilt when they change."""
GATING_CODES = {"softmax": 0, "sigmoid": 1, "softmax_of_selected": 2}
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
POSITIONS_PER_PIECE = 256
"""Minimum positions of a KV split: fewer do not justify a thread."""


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


def attention_pieces(threads: int, kv_heads: int) -> int:
    """Maximum number of KV splits of a step's attention; see `pieces_of` in `native/attention.py`."""
    return STEP_TOKENS * (4 * threads + kv_heads)


ActivationOffsets = namedtuple("ActivationOffsets", "values scale sum first_sum last_sum")
ACTIVATIONS = ActivationOffsets(0, 32, 36, 40, 44)
"""A block of 32 quantized activations: int8, then float32: their scale, and the sums of all, of the first 16
and of the last 16 values times the scale.
"""
ACTIVATION_BYTES = 48
ACTIVATIONS_PER_BLOCK = 32


def quantized_bytes(columns: int) -> int:
    """Bytes of one row of activations: the maximum of int8 blocks and its part of bfloat16 tiles."""
    return -(-columns // 32) * max(ACTIVATION_BYTES, TILE_BYTES // 16)
