"""Bytes of the buffers for decode steps and prefill on a CUDA device, and of the exchange buffers of a split
model.

The counts match the allocations of `workspace.py`, `prefill.py`, `sampling.py`, `streamed_layers.py` and
`expert_loading.py` exactly; a test compares the two.
"""

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from edgeinfer_kernels.cpu.runtime.abi import MAILBOX_BYTES
from edgeinfer_kernels.cuda.tuning.step_shapes import MAX_SPLITS, next_power_of_two
from edgeinfer_kernels.cuda.weights.plane_formats import FLOAT_CODES, ROW_MULTIPLE, PlaneShapes, padded_blocks
from edgeinfer_kernels.layer_cache import padded
from edgeinfer_kernels.sizes.cuda_matrices import (
    cache_positions,
    downs_of,
    entered,
    feed_forwards_of,
    padded_rows,
    planes_of,
    row_runs,
    taken,
    vector_bytes,
)
from edgeinfer_kernels.sizes.model_sizes import NEURON_GROUP, ExpertSizes, MatrixSize, ModelSizes

CHUNK = 512
"""Tokens of a prompt that are evaluated in one step."""
MAX_TOKENS = 8
"""Maximum number of tokens of a decode step."""
EVERY_WIDTH = tuple(range(1, MAX_TOKENS + 1))
FEW_WIDTHS = (1, 2, 4, MAX_TOKENS)
"""Step sizes, in tokens, that are prepared if only the last tokens of a prompt come in groups: the kernels of
one step size take up to fifteen seconds to compile.
"""
STATE_WORDS = 32
"""Words of the int32 state of a step: ids at 0, positions at 8, masks of the step's visible tokens at 16,
cached length at 24; at 25 a flag that the CPU side was lost.
"""
SCRATCH_WEIGHTS = 32 << 20
"""Maximum number of weights that are dequantized at a time: 64 MiB, about the cache size of a large GPU."""
EXPERT_PRODUCT_BYTES = 48 << 20
"""Bytes of float32 matmul results with several experts at a time; more if one expert alone needs more."""
SENT_PIECE_BYTES = 16 << 20
"""Maximum bytes of streamed weights per transfer during prefill."""
SENT_PIECES = 4
"""Maximum number of such transfers that are on the device at once."""
REFILL_BYTES = 1 << 20
"""Bytes of an expert that are loaded to the device at a time during decode."""
REFILL_COPIES = 48
"""Device bytes needed to pack a loaded piece, as a multiple of its size, for all formats of a model."""
SLICE = 2048
"""Logits per program of the sampler, which keeps the largest of them."""
KEPT = 64
"""How many logits it keeps."""
REQUEST_SIZE = 9
"""Numbers in a sampling request."""
RECENT = 1024
"""Maximum number of token ids for penalties on the device."""


class PromptRooms(NamedTuple):
    """Element counts of the prefill buffers: hidden rows, their scales, and matmul results."""

    hidden: int
    scales: int
    products: int


def attention_rows(heads: int, kv_heads: int, tokens: int) -> int:
    """Rows of the query tile of a KV head."""
    return max(16, next_power_of_two(heads // kv_heads * tokens))


def head_dimensions(head_dim: int) -> int:
    """head_dim padded to the tiles of the kernels."""
    return max(16, next_power_of_two(head_dim))


def _has_floats(matrices: Iterable[MatrixSize]) -> bool:
    return any(planes_of(matrix).tile.code in FLOAT_CODES for matrix in matrices)


def _mixtures(sizes: ModelSizes) -> list[ExpertSizes]:
    return [layer.experts for layer in sizes.layers if layer.experts]


def _used(sizes: ModelSizes) -> int:
    """The maximum experts_per_token; 0: no experts."""
    return max((experts.used for experts in _mixtures(sizes)), default=0)


def _routing_bytes(sizes: ModelSizes, tokens: int) -> int:
    """Bytes of the scores, expert ids and weights of a step's or chunk's tokens; see `RoutingSpace`."""
    used, count = _used(sizes), max((experts.count for experts in _mixtures(sizes)), default=0)
    words = (padded_rows(count), used, used, ROW_MULTIPLE if used else 0)
    return sum(taken(tokens * each, 4) for each in words)


def _step_bytes(sizes: ModelSizes) -> int:
    """Bytes of the buffers of a decode step; see `workspace.py`."""
    width, tokens, layers, mixtures = sizes.width, MAX_TOKENS, sizes.layers, _mixtures(sizes)

    def activations(columns: int, floats: bool, rows_a_token: int = 1) -> int:
        return taken(rows_a_token * tokens * (44 if floats else 12) * padded_blocks(columns), 4)

    of_width = [matrix for layer in layers for matrix in (layer.q, layer.k, layer.v, *entered(layer))]
    heads = max(layer.heads * layer.head_dim for layer in layers)
    qkv_rows = max(
        sum(padded_rows(run.rows) for run in row_runs((layer.q, layer.k, layer.v))) for layer in layers
    )
    tiles = [
        (layer.kv_heads * MAX_SPLITS * attention_rows(layer.heads, layer.kv_heads, tokens), layer.head_dim)
        for layer in layers
    ]
    programs = padded_rows(sizes.head.rows) // ROW_MULTIPLE
    floats = [
        tokens * width,
        tokens * padded_rows(width),
        *[tokens * (padded_rows(width) // ROW_MULTIPLE)] * 2,
        tokens * qkv_rows,
        tokens * heads,
        max(rows * head_dimensions(head_dim) for rows, head_dim in tiles),
        2 * max(rows for rows, _ in tiles),
        tokens * sizes.vocabulary,
    ]
    words = [STATE_WORDS, max(layer.kv_heads for layer in layers), *[tokens * programs] * 2]
    entering = activations(width, _has_floats((sizes.head, *of_width)))
    mixed = activations(heads, _has_floats(layer.output for layer in layers))
    downs = _has_floats(down for layer in layers for down in downs_of(layer))
    dense = [layer.feed_forward.neurons for layer in layers if layer.feed_forward]
    experts = [mixture.expert.neurons for mixture in mixtures]
    shared = [mixture.shared.neurons for mixture in mixtures if mixture.shared]
    padded_hidden = max((neurons for neurons in dense if neurons % NEURON_GROUP), default=0)
    hidden = activations(padded_hidden, downs) + activations(max(dense, default=0), downs)
    hidden += activations(max(shared, default=0), downs)
    hidden += activations(max(experts, default=0), downs, _used(sizes))
    early = activations(width, _has_floats(of_width)) if any(m.early for m in mixtures) else 0
    rows = 2 * entering + mixed + hidden + early + _routing_bytes(sizes, tokens)
    return rows + sum(taken(count, 4) for count in (*floats, *words))


def prompt_hidden(sizes: ModelSizes) -> int:
    """Elements of the longest hidden row during prefill."""
    return max(block.neurons for layer in sizes.layers for block in layer.feed_forwards())


def _prompt_shapes(sizes: ModelSizes) -> list[PlaneShapes]:
    """Shapes of every matrix of a prefill; all experts of a layer as one."""
    layers = sizes.layers
    runs = [run for layer in layers for run in (*row_runs((layer.q, layer.k, layer.v)), layer.output)]
    others = [matrix for layer in layers for matrix in (*entered(layer), *downs_of(layer))]
    return [planes_of(matrix) for matrix in (*runs, *others)]


def prompt_scratch(sizes: ModelSizes) -> int:
    """Weights that prefill dequantizes at a time."""
    return max(
        min(shape.padded_rows, max(SCRATCH_WEIGHTS // shape.columns // 16, 1) * 16) * shape.columns
        for shape in _prompt_shapes(sizes)
    )


def expert_rows(sizes: ModelSizes, chunk: int) -> int:
    """Maximum number of token-expert assignments that prefill computes together: `chunk` or more, 0 without
    experts.
    """
    hidden = max((experts.expert.neurons for experts in _mixtures(sizes)), default=0)
    room = EXPERT_PRODUCT_BYTES // (4 * max(2 * hidden, sizes.width))
    return max(min(room, chunk * _used(sizes)), chunk) if hidden else 0


def prompt_rooms(sizes: ModelSizes, chunk: int) -> PromptRooms:
    """See `PromptRooms`."""
    hidden, experts = prompt_hidden(sizes), expert_rows(sizes, chunk)
    own = max((mixture.expert.neurons for mixture in _mixtures(sizes)), default=0)
    qkv = max((layer.heads + 2 * layer.kv_heads) * layer.head_dim for layer in sizes.layers)
    return PromptRooms(
        hidden=max(chunk * hidden, experts * own),
        scales=max(chunk, experts),
        products=max(chunk * max(qkv, 2 * hidden, sizes.width), experts * max(2 * own, sizes.width)),
    )


def _prompt_bytes(sizes: ModelSizes, chunk: int) -> int:
    """Bytes of the prefill buffers; see `prefill.py`."""
    layers, width = sizes.layers, sizes.width
    heads = max(layer.heads * layer.head_dim for layer in layers)
    rooms = prompt_rooms(sizes, chunk)
    halves = [chunk * width, chunk * heads, chunk * heads, rooms.hidden, prompt_scratch(sizes)]
    floats = [chunk, chunk * width, rooms.products, rooms.scales, chunk, chunk]
    if _mixtures(sizes):
        floats += [chunk * width, chunk * width, expert_rows(sizes, chunk)]
        floats += [4 * chunk * _used(sizes), 2 * max(experts.count for experts in _mixtures(sizes))]
    buffers = sum(taken(count, 2) for count in halves) + sum(taken(count, 4) for count in floats)
    return buffers + _routing_bytes(sizes, chunk)


def mailbox_bytes(sizes: ModelSizes, tokens: int) -> int:
    """Bytes of pinned main memory for the exchange between the shards of a split model; see
    `exchange_buffer.py`.
    """
    return MAILBOX_BYTES + tokens * (4 * padded(sizes.width) + 12 * _used(sizes))


def sent_piece_bytes(sizes: ModelSizes) -> int:
    """Bytes of streamed weights per transfer during prefill: at most the size of the largest matrix."""
    matrices = {
        *(matrix for layer in sizes.layers for matrix in layer.attention_matrices()),
        *(
            matrix
            for layer in sizes.layers
            for block in feed_forwards_of(layer)
            for matrix in block.matrices()
        ),
    }
    largest = max(replace(matrix, rows=padded_rows(matrix.rows)).nbytes for matrix in matrices)
    return taken(min(largest, SENT_PIECE_BYTES), 1)


def sent_bytes(sizes: ModelSizes, context: int, host_attends: bool) -> int:
    """Maximum device bytes for streaming the CPU's weights during prefill, for any split; `host_attends`:
    some attention is on the CPU. See `streamed_layers.py`.
    """
    cached = max(layer.kv_heads * layer.head_dim for layer in sizes.layers) if host_attends else 0
    caches = 2 * taken(cached * cache_positions(context), 2)
    vectors = 0
    for layer in sizes.layers:
        vectors += vector_bytes(layer.vectors) + 2 * taken(layer.head_dim, 8)
        each, count = layer.divisible(), layer.experts.count if layer.experts else 1
        biases = 2 * taken(padded_rows(each.neurons), 4) if each.biased else 0
        vectors += count * (biases + vector_bytes(each.vectors))
    return SENT_PIECES * sent_piece_bytes(sizes) + caches + vectors


def refill_bytes(sizes: ModelSizes) -> int:
    """Device bytes for loading experts during decode; see `expert_loading.py`."""
    stacks = [matrix.nbytes for mixture in _mixtures(sizes) for matrix in mixture.expert.matrices()]
    return REFILL_COPIES * min(REFILL_BYTES, max(stacks, default=0))


def _drawing_bytes(vocabulary: int) -> int:
    """Bytes for sampling a token on the device; see `backend.py`."""
    slices = -(-vocabulary // SLICE)
    words = (slices, slices, slices, RECENT, 1, 2)
    return taken(slices * KEPT, 8) + taken(REQUEST_SIZE, 8) + sum(taken(count, 4) for count in words)


def workspace_bytes(sizes: ModelSizes, chunk: int = CHUNK) -> int:
    """Bytes of the buffers of decode steps, prefill in chunks, and sampling. Raises
    `UnsupportedOnDeviceError`.
    """
    return _step_bytes(sizes) + _prompt_bytes(sizes, chunk) + _drawing_bytes(sizes.vocabulary)
