"""Bytes of the buffers for decode steps and prefill on a CUDA device, and of the exchange buffers of a split
model.

The counts match the allocations of `workspace.py`, `prefill.py`, `sampling.py`, `streamed_layers.py` and
`expert_loading.py` exactly; a test compares the two.
"""

from dataclasses import replace

from edgeinfer_kernels.blocks.common.block_sizes import ChunkRows, StepShape
from edgeinfer_kernels.caches.cache_types import CacheType, has_recent
from edgeinfer_kernels.caches.layer_cache import LANES, padded
from edgeinfer_kernels.cpu.runtime.kernel_args import EXCHANGE_WORDS
from edgeinfer_kernels.cuda.weights.plane_formats import ROW_MULTIPLE, PlaneShapes
from edgeinfer_kernels.sizes.cuda_matrices import (
    activation_bytes,
    cache_positions,
    has_floats,
    padded_rows,
    planes_of,
    taken,
)
from edgeinfer_kernels.sizes.model_sizes import ModelSizes

CHUNK = 512
"""Tokens of a prompt that are evaluated in one step."""
MAX_TOKENS = 16
"""Maximum number of tokens of a decode step."""
ALL_STEP_SIZES = (*range(1, 9), MAX_TOKENS)
"""Step sizes, in tokens, that are prepared if drafts are verified. More than 8 are padded to 16, because
tensor cores process as many in any case.
"""
COMMON_STEP_SIZES = (1, 2, 4, 8, MAX_TOKENS)
"""Step sizes, in tokens, that are prepared if only the last tokens of a prompt come in groups: the kernels of
one step size take up to fifteen seconds to compile.
"""
POSITIONS_AT, MASKS_AT, CACHED_AT, LOST_AT, STATES_AT, POWER_AT, PATH_AT = 16, 32, 48, 49, 50, 51, 64
SEQUENCES_AT = 88
SEQUENCE_WORDS = 8
STATE_WORDS = SEQUENCES_AT + MAX_TOKENS * SEQUENCE_WORDS
"""Words of the int32 state of a step: ids at 0, positions, masks of the step's visible tokens, cached length,
a flag that the CPU side was lost, for a draft head the row of its target's state that belongs to position 0
and the power of the probabilities of a tree, float32;
from PATH_AT on, of a tree, its first position and the rows of the path that is kept, and in a step of a draft
head for each token 1 plus the row before it; from SEQUENCES_AT on SEQUENCE_WORDS for each sequence: its first
position, a `RecurrentStep`, its number of tokens without padding, and the first row of its ring. A step of
one sequence has the first of them.
"""
FIRST_BIT = 16
"""From this bit on the mask of a token in a batch has the number of the first token of its sequence."""
KEPT_STATES = 1024
"""Positions whose hidden states a target on a GPU keeps for its draft head: two chunks."""
SCRATCH_WEIGHTS = 32 << 20
"""Maximum number of weights that are dequantized at a time: 64 MiB, about the cache size of a large GPU."""
STREAMED_PIECE_BYTES = 16 << 20
"""Maximum bytes of streamed weights per transfer during prefill."""
STREAMED_PIECES = 4
"""Maximum number of such transfers that are on the device at once."""
EXPERT_LOAD_BYTES = 1 << 20
"""Bytes of an expert that are loaded to the device at a time during decode."""
EXPERT_LOAD_COPIES = 48
"""Device bytes needed to pack a loaded piece, as a multiple of its size, for all formats of a model."""
SLICE = 2048
"""Logits per program of the sampler, which keeps the largest of them."""
KEPT = 64
"""How many logits it keeps."""
REQUEST_SIZE = 9
"""Numbers in a sampling request."""
RECENT = 1024
"""Maximum number of token ids for penalties on the device."""


def moe_width(sizes: ModelSizes) -> int:
    """The maximum experts_per_token; 0: no experts."""
    return max((layer.routed.granules_per_token for layer in sizes.layers if layer.routed), default=0)


def _step_bytes(sizes: ModelSizes) -> int:
    """Bytes of the buffers of a decode step; see `workspace.py`."""
    width, tokens = sizes.hidden_size, MAX_TOKENS
    inputs = [matrix for block in sizes.blocks for matrix in block.inputs()]
    outputs = [matrix for block in sizes.blocks if block.is_divisible for matrix in block.outputs()]
    step = StepShape(tokens, width, has_floats(inputs), has_floats(outputs))
    programs = padded_rows(sizes.head.rows) // ROW_MULTIPLE
    counts = [
        tokens * width,
        tokens * padded_rows(width),
        padded_rows(width) // ROW_MULTIPLE,
        *[tokens * (padded_rows(width) // ROW_MULTIPLE)] * 2,
        tokens * sizes.vocabulary,
        STATE_WORDS,
        *[tokens * programs] * 2,
    ]
    inputs_at_once = 2 + any(block.has_own_norm for block in sizes.blocks)
    normed = inputs_at_once * activation_bytes(tokens, width, has_floats((sizes.head, *inputs)))
    kinds = sum(kind.step_bytes(blocks, step) for kind, blocks in sizes.by_kind().items())
    return normed + kinds + sum(taken(count, 4) for count in counts)


def _prompt_shapes(sizes: ModelSizes) -> list[PlaneShapes]:
    """Shapes of every matrix of a prefill; all experts of a layer as one."""
    shapes = []
    for block in sizes.blocks:
        shapes += [*block.stacked_inputs(), *block.inner(), *block.outputs()]
    return [planes_of(matrix) for matrix in shapes]


def prompt_scratch(sizes: ModelSizes) -> int:
    """Weights that prefill dequantizes at a time."""
    return max(
        min(shape.padded_rows, max(SCRATCH_WEIGHTS // shape.columns // 16, 1) * 16) * shape.columns
        for shape in _prompt_shapes(sizes)
    )


def chunk_rows(sizes: ModelSizes, chunk: int) -> ChunkRows:
    """Elements of the buffers that all blocks share for a chunk."""
    width = sizes.hidden_size
    rows = [block.chunk_rows(chunk, width) for block in sizes.blocks]
    return ChunkRows(
        hidden=max(each.hidden for each in rows),
        scales=max(chunk, *(each.scales for each in rows)),
        products=max(chunk * width, *(each.products for each in rows)),
    )


def _prompt_bytes(sizes: ModelSizes, chunk: int) -> int:
    """Bytes of the prefill buffers; see `prefill.py`."""
    width, shared = sizes.hidden_size, chunk_rows(sizes, chunk)
    own = chunk * any(block.has_own_norm for block in sizes.blocks)
    f16 = [chunk * width, own * width, shared.hidden, prompt_scratch(sizes)]
    f32 = [own, chunk, chunk * width, shared.products, shared.scales, chunk, chunk]
    kinds = sum(kind.prompt_bytes(blocks, chunk, width) for kind, blocks in sizes.by_kind().items())
    kinds += taken(STATE_WORDS, 4) * (1 + sizes.is_recurrent)
    return kinds + sum(taken(count, 2) for count in f16) + sum(taken(count, 4) for count in f32)


def exchange_buffer_bytes(sizes: ModelSizes, tokens: int) -> int:
    """Bytes of pinned main memory for the exchange between the shards of a split model; see
    `exchange_buffer.py`.
    """
    return 8 * EXCHANGE_WORDS + tokens * (4 * padded(sizes.hidden_size) + 12 * moe_width(sizes))


def streamed_piece_bytes(sizes: ModelSizes) -> int:
    """Bytes of streamed weights per transfer during prefill: at most the size of the largest matrix."""
    matrices = {
        matrix for block in sizes.blocks for matrix in (*block.inputs(), *block.inner(), *block.outputs())
    }
    largest = max(replace(matrix, rows=padded_rows(matrix.rows)).nbytes for matrix in matrices)
    return taken(min(largest, STREAMED_PIECE_BYTES), 1)


def streaming_bytes(sizes: ModelSizes, context: int, host_attends: bool) -> int:
    """Maximum device bytes for streaming the CPU's weights during prefill, for any split; `host_attends`:
    some state is on the CPU. See `streamed_layers.py`.
    """
    caches = 0
    if host_attends:
        caches = sum(kind.streamed_state_bytes(blocks, context) for kind, blocks in sizes.by_kind().items())
    vectors = sum(block.streamed_vector_bytes() for block in sizes.blocks)
    return STREAMED_PIECES * streamed_piece_bytes(sizes) + caches + vectors


def expert_load_bytes(sizes: ModelSizes) -> int:
    """Device bytes for loading experts during decode; see `expert_loading.py`."""
    blocks = [layer.routed for layer in sizes.layers if layer.routed]
    stacks = [matrix.nbytes for block in blocks for matrix in block.granule_matrices()]
    return EXPERT_LOAD_COPIES * min(EXPERT_LOAD_BYTES, max(stacks, default=0))


def kept_state_bytes(head: ModelSizes) -> int:
    """Bytes of the hidden states that a target keeps for its draft head."""
    return taken(KEPT_STATES * head.state_width, 4)


def _drawing_bytes(vocabulary: int) -> int:
    """Bytes for sampling the tokens of a step on the device; see `device_parts.py`."""
    rows, slices = MAX_TOKENS, -(-vocabulary // SLICE)
    words = (slices, slices, slices, RECENT, 1, 2)
    numbers = taken(rows * slices * KEPT, 8) + taken(rows * REQUEST_SIZE, 8)
    return numbers + sum(taken(rows * count, 4) for count in words)


def workspace_bytes(sizes: ModelSizes, context: int, chunk: int = CHUNK, kind: CacheType = "f16") -> int:
    """Bytes of the buffers of decode steps, prefill in chunks, and sampling, and of the pages of a batch's
    sequences, and the slots of recent positions, in a cache of this type for `context` tokens. Raises
    `UnsupportedOnDeviceError`.
    """
    pages = taken(MAX_TOKENS * (cache_positions(context) // LANES), 4)
    pages += taken(cache_positions(context) // LANES * has_recent(kind), 4)
    prompts = _prompt_bytes(sizes, chunk) if sizes.reads_prompts else 0
    return _step_bytes(sizes) + prompts + _drawing_bytes(sizes.vocabulary) + pages
