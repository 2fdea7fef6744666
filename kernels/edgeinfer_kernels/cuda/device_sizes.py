"""Bytes that a decoder takes on a CUDA device, counted from its sizes alone: no torch, no GPU.

What is counted here is what `device_model.py`, `workspace.py`, `prefill.py` and `sampling.py` take from their
arena, to the byte; a test compares the two.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

from edgeinfer_kernels.cpu.structures import MAILBOX_BYTES
from edgeinfer_kernels.cuda.plane_formats import (
    FLOAT_CODES,
    ROW_MULTIPLE,
    PlaneShapes,
    UnsupportedOnDeviceError,
    padded_blocks,
)
from edgeinfer_kernels.cuda.step_shapes import MOST_SPLITS, next_power_of_two
from edgeinfer_kernels.layer_cache import CacheType, padded
from edgeinfer_kernels.model_sizes import (
    NEURON_GROUP,
    ExpertSizes,
    FeedForwardSizes,
    LayerSizes,
    MatrixSize,
    ModelSizes,
)

ALIGNMENT = 256
"""Every piece of the device's memory begins at a multiple of so many bytes."""
SPARE_POSITIONS = 16
"""Positions of a cache beyond the context: a step writes whole tiles."""
CHUNK = 512
"""Tokens of a prompt that are read in one step."""
MOST_TOKENS = 8
"""Tokens of a decode step at most."""
EVERY_WIDTH = tuple(range(1, MOST_TOKENS + 1))
FEW_WIDTHS = (1, 2, 4, MOST_TOKENS)
"""Tokens of the steps that are made ready where only a prompt's last tokens come several at a time: kernels
of one width take up to fifteen seconds to compile.
"""
STATE_WORDS = 32
"""int32 state of a step: ids at 0, positions at 8, masks of the step's visible tokens at 16, cached at 24; at
25 whether the host was lost.
"""
SCRATCH_WEIGHTS = 32 << 20
"""Most weights that are dequantised at a time: 64 MiB, about what a large GPU's cache holds."""
EXPERT_PRODUCT_BYTES = 48 << 20
"""Of products of rows with several experts, float32, at a time; more if one expert's take more."""
SENT_PIECE_BYTES = 16 << 20
"""Bytes of the host's weights that a prompt sends at a time, at most."""
SENT_PIECES = 4
"""Pieces that may be on the device at once."""
REFILL_BYTES = 1 << 20
"""Of an expert that come to the device at a time while it decodes."""
REFILL_COPIES = 48
"""How many times what comes at a time packing it takes there, for all of a model's formats."""
SLICE = 2048
"""Logits of which a program of the sampler keeps the best."""
KEPT = 64
"""How many it keeps."""
REQUEST_SIZE = 9
"""Numbers that describe a draw."""
RECENT = 1024
"""Most ids that penalties on the device can count."""


class PromptRooms(NamedTuple):
    """Elements of a prompt's buffers: hidden rows, their scales, and products."""

    hidden: int
    scales: int
    products: int


def cache_positions(context: int) -> int:
    """Positions of a cache for so many tokens: always a multiple of SPARE_POSITIONS, as kernels are compiled
    to know, so that every context has the same ones.
    """
    return (-(-context // SPARE_POSITIONS) + 1) * SPARE_POSITIONS


def taken(elements: int, size: int) -> int:
    """Bytes of a piece of `elements` of `size` bytes, rounded up to the alignment."""
    return -(-elements * size // ALIGNMENT) * ALIGNMENT


def padded_rows(rows: int) -> int:
    """Rows that a matrix of so many takes."""
    return -(-rows // ROW_MULTIPLE) * ROW_MULTIPLE


def _planes(matrix: MatrixSize) -> PlaneShapes:
    return PlaneShapes.of(matrix.name, matrix.format, matrix.rows, matrix.columns)


def matrix_bytes(matrix: MatrixSize) -> int:
    """Bytes of a matrix in planes. Raises `UnsupportedOnDeviceError`."""
    shapes = _planes(matrix)
    rows, planes, blocks = shapes.words
    pieces = (rows * planes * blocks, *(a * b for a, b in (shapes.scales, shapes.supers)))
    return sum(taken(piece, 4) for piece in pieces)


def _vector_bytes(lengths: Iterable[int]) -> int:
    return sum(taken(length, 4) for length in lengths)


def _runs(matrices: Sequence[MatrixSize]) -> list[MatrixSize]:
    """Neighbours of one format on top of each other."""
    runs: list[MatrixSize] = []
    for matrix in matrices:
        if runs and runs[-1].format == matrix.format:
            top = runs.pop()
            matrix = MatrixSize(top.name, top.format, top.rows + matrix.rows, top.columns)
        runs.append(matrix)
    return runs


def attention_bytes(layer: LayerSizes) -> int:
    """One layer's attention without its RoPE table. Raises `UnsupportedOnDeviceError`."""
    if layer.q.rows % ROW_MULTIPLE or layer.k.rows % ROW_MULTIPLE:
        raise UnsupportedOnDeviceError(
            f"{layer.k.name}: {layer.k.rows} rows (q: {layer.q.rows}), the GPU's kernels want a "
            f"multiple of {ROW_MULTIPLE}"
        )
    stack = sum(map(matrix_bytes, _runs((layer.q, layer.k, layer.v))))
    return stack + matrix_bytes(layer.output) + _vector_bytes(layer.vectors)


def rope_bytes(sizes: ModelSizes, context: int) -> int:
    """Cosines and sines of all positions, float32; a table for all layers that share it."""
    tables = {(layer.rope_table, layer.head_dim) for layer in sizes.layers}
    return sum(taken(cache_positions(context) * head_dim, 4) for _, head_dim in tables)


def feed_forward_bytes(sizes: FeedForwardSizes) -> int:
    """One layer's dense feed-forward, or one expert. Raises `UnsupportedOnDeviceError`."""
    biases = 2 * taken(padded_rows(sizes.neurons), 4) if sizes.biased else 0
    return sum(map(matrix_bytes, sizes.matrices())) + biases + _vector_bytes(sizes.vectors)


def shared_bytes(experts: ExpertSizes) -> int:
    """What a mixture has once: its router, in planes and as floats, where each expert lies, and the shared
    expert with its own.

    Raises `UnsupportedOnDeviceError`.
    """
    routers = sum(matrix_bytes(router) + taken(router.weights, 4) for router in _routers(experts))
    bias = taken(padded_rows(experts.count), 4) if experts.router_biased else 0
    places = taken(2 * experts.count, 4)
    return routers + places + bias + (feed_forward_bytes(experts.shared) if experts.shared else 0)


def _routers(experts: ExpertSizes) -> list[MatrixSize]:
    """The router, and the row that weighs the shared expert."""
    weigher = MatrixSize("ffn_gate_inp_shexp", "F32", 1, experts.router.columns)
    return [experts.router, *([weigher] if experts.shared_weighed else [])]


def _entered(layer: LayerSizes) -> list[MatrixSize]:
    """The matrices of a feed-forward that are multiplied with its normed rows, all experts' in one."""
    found = [matrix for block in _blocks(layer) for matrix in (block.up, block.gate) if matrix]
    return found + (_routers(layer.experts) if layer.experts else [])


def _downs(layer: LayerSizes) -> list[MatrixSize]:
    return [block.down for block in _blocks(layer)]


def _blocks(layer: LayerSizes) -> list[FeedForwardSizes]:
    """A layer's feed-forwards; its experts as one, their rows on top of each other."""
    if layer.experts is None:
        return layer.feed_forwards()
    count, one = layer.experts.count, layer.experts.expert
    up, down = replace(one.up, rows=count * one.up.rows), replace(one.down, rows=count * one.down.rows)
    gate = one.gate and replace(one.gate, rows=count * one.gate.rows)
    shared = [layer.experts.shared] if layer.experts.shared else []
    return [FeedForwardSizes(up, down, gate), *shared]


def cache_bytes(layer: LayerSizes, context: int, kind: CacheType) -> int:
    """One layer's keys and values: float16, or a byte or four bits with a float16 scale for 32."""
    rows = layer.kv_heads * cache_positions(context)
    width = layer.head_dim
    elements, size = {"f16": (width, 2), "q8_0": (width, 1), "q4_0": (-(-width // 8), 4)}[kind]
    scales = 0 if kind == "f16" else -(-width // 32)
    return 2 * (taken(rows * elements, size) + taken(rows * scales, 2))


def head_bytes(sizes: ModelSizes) -> int:
    """The last norm and the head. Raises `UnsupportedOnDeviceError`."""
    return _vector_bytes(sizes.vectors) + matrix_bytes(sizes.head)


def attention_rows(heads: int, kv_heads: int, tokens: int) -> int:
    """Rows of the query tile of a key-value head."""
    return max(16, next_power_of_two(heads // kv_heads * tokens))


def head_dimensions(head_dim: int) -> int:
    """A head's dimensions as kernels cut them."""
    return max(16, next_power_of_two(head_dim))


def _has_floats(matrices: Iterable[MatrixSize]) -> bool:
    return any(_planes(matrix).tile.code in FLOAT_CODES for matrix in matrices)


def _mixtures(sizes: ModelSizes) -> list[ExpertSizes]:
    return [layer.experts for layer in sizes.layers if layer.experts]


def _used(sizes: ModelSizes) -> int:
    """Experts of a token at most; 0: there are none."""
    return max((experts.used for experts in _mixtures(sizes)), default=0)


def _routing_bytes(sizes: ModelSizes, tokens: int) -> int:
    """Scores, choices and weights of a step's or a chunk's tokens; see `RoutingSpace`."""
    used, count = _used(sizes), max((experts.count for experts in _mixtures(sizes)), default=0)
    words = (padded_rows(count), used, used, ROW_MULTIPLE if used else 0)
    return sum(taken(tokens * each, 4) for each in words)


def _step_bytes(sizes: ModelSizes) -> int:
    """The buffers of a decode step; see `workspace.py`."""
    width, tokens, layers, mixtures = sizes.width, MOST_TOKENS, sizes.layers, _mixtures(sizes)

    def activations(columns: int, floats: bool, rows_a_token: int = 1) -> int:
        return taken(rows_a_token * tokens * (44 if floats else 12) * padded_blocks(columns), 4)

    of_width = [matrix for layer in layers for matrix in (layer.q, layer.k, layer.v, *_entered(layer))]
    heads = max(layer.heads * layer.head_dim for layer in layers)
    qkv_rows = max(
        sum(padded_rows(run.rows) for run in _runs((layer.q, layer.k, layer.v))) for layer in layers
    )
    tiles = [
        (layer.kv_heads * MOST_SPLITS * attention_rows(layer.heads, layer.kv_heads, tokens), layer.head_dim)
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
    downs = _has_floats(down for layer in layers for down in _downs(layer))
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
    """Elements of a prompt's longest hidden row."""
    return max(block.neurons for layer in sizes.layers for block in layer.feed_forwards())


def _prompt_shapes(sizes: ModelSizes) -> list[PlaneShapes]:
    """Of every matrix that a prompt is multiplied with, all experts' in one."""
    layers = sizes.layers
    runs = [run for layer in layers for run in (*_runs((layer.q, layer.k, layer.v)), layer.output)]
    others = [matrix for layer in layers for matrix in (*_entered(layer), *_downs(layer))]
    return [_planes(matrix) for matrix in (*runs, *others)]


def prompt_scratch(sizes: ModelSizes) -> int:
    """Weights that a prompt dequantises at a time."""
    return max(
        min(shape.padded_rows, max(SCRATCH_WEIGHTS // shape.columns // 16, 1) * 16) * shape.columns
        for shape in _prompt_shapes(sizes)
    )


def expert_rows(sizes: ModelSizes, chunk: int) -> int:
    """Pairs of token and expert that a prompt takes together at most: `chunk` or more, 0 without experts."""
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
    """The buffers of a prompt; see `prefill.py`."""
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
    """Pinned main memory through which the halves of a divided model hand over; see `mailbox.py`."""
    return MAILBOX_BYTES + tokens * (4 * padded(sizes.width) + 12 * _used(sizes))


def sent_piece_bytes(sizes: ModelSizes) -> int:
    """Bytes of the host's weights that a prompt sends at a time: no more than the largest matrix takes."""
    matrices = {
        *(matrix for layer in sizes.layers for matrix in layer.attention_matrices()),
        *(matrix for layer in sizes.layers for block in _blocks(layer) for matrix in block.matrices()),
    }
    largest = max(replace(matrix, rows=padded_rows(matrix.rows)).nbytes for matrix in matrices)
    return taken(min(largest, SENT_PIECE_BYTES), 1)


def sent_bytes(sizes: ModelSizes, context: int, host_attends: bool) -> int:
    """What a divided model takes to send the host's weights for prompts, at most, wherever it is divided;
    `host_attends`: some attention is the host's. See `sent_layers.py`.
    """
    cached = max(layer.kv_heads * layer.head_dim for layer in sizes.layers) if host_attends else 0
    caches = 2 * taken(cached * cache_positions(context), 2)
    vectors = 0
    for layer in sizes.layers:
        vectors += _vector_bytes(layer.vectors) + 2 * taken(layer.head_dim, 8)
        each, count = layer.divisible(), layer.experts.count if layer.experts else 1
        biases = 2 * taken(padded_rows(each.neurons), 4) if each.biased else 0
        vectors += count * (biases + _vector_bytes(each.vectors))
    return SENT_PIECES * sent_piece_bytes(sizes) + caches + vectors


def refill_bytes(sizes: ModelSizes) -> int:
    """What it takes to bring experts to the device while it decodes; see `expert_refills.py`."""
    stacks = [matrix.nbytes for mixture in _mixtures(sizes) for matrix in mixture.expert.matrices()]
    return REFILL_COPIES * min(REFILL_BYTES, max(stacks, default=0))


def _drawing_bytes(vocabulary: int) -> int:
    """What drawing a token on the device takes; see `backend.py`."""
    slices = -(-vocabulary // SLICE)
    words = (slices, slices, slices, RECENT, 1, 2)
    return taken(slices * KEPT, 8) + taken(REQUEST_SIZE, 8) + sum(taken(count, 4) for count in words)


def workspace_bytes(sizes: ModelSizes, chunk: int = CHUNK) -> int:
    """The buffers of steps, prompts in chunks and draws. Raises `UnsupportedOnDeviceError`."""
    return _step_bytes(sizes) + _prompt_bytes(sizes, chunk) + _drawing_bytes(sizes.vocabulary)
