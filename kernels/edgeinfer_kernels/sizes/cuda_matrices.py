"""Bytes of a decoder's weights and caches on a CUDA device, counted from its sizes alone: no torch, no GPU.

What is counted here is what `device_model.py` takes from its arena, to the byte; a test compares the two.
Buffers are counted in `buffer_sizes.py`.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from edgeinfer_kernels.cuda.weights.plane_formats import ROW_MULTIPLE, PlaneShapes, UnsupportedOnDeviceError
from edgeinfer_kernels.layer_cache import CacheType
from edgeinfer_kernels.sizes.model_sizes import (
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


def planes_of(matrix: MatrixSize) -> PlaneShapes:
    return PlaneShapes.of(matrix.name, matrix.format, matrix.rows, matrix.columns)


def matrix_bytes(matrix: MatrixSize) -> int:
    """Bytes of a matrix in planes. Raises `UnsupportedOnDeviceError`."""
    shapes = planes_of(matrix)
    rows, planes, blocks = shapes.words
    pieces = (rows * planes * blocks, *(a * b for a, b in (shapes.scales, shapes.supers)))
    return sum(taken(piece, 4) for piece in pieces)


def vector_bytes(lengths: Iterable[int]) -> int:
    return sum(taken(length, 4) for length in lengths)


def row_runs(matrices: Sequence[MatrixSize]) -> list[MatrixSize]:
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
    stack = sum(map(matrix_bytes, row_runs((layer.q, layer.k, layer.v))))
    return stack + matrix_bytes(layer.output) + vector_bytes(layer.vectors)


def rope_bytes(sizes: ModelSizes, context: int) -> int:
    """Cosines and sines of all positions, float32; a table for all layers that share it."""
    tables = {(layer.rope_table, layer.head_dim) for layer in sizes.layers}
    return sum(taken(cache_positions(context) * head_dim, 4) for _, head_dim in tables)


def feed_forward_bytes(sizes: FeedForwardSizes) -> int:
    """One layer's dense feed-forward, or one expert. Raises `UnsupportedOnDeviceError`."""
    biases = 2 * taken(padded_rows(sizes.neurons), 4) if sizes.biased else 0
    return sum(map(matrix_bytes, sizes.matrices())) + biases + vector_bytes(sizes.vectors)


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


def entered(layer: LayerSizes) -> list[MatrixSize]:
    """The matrices of a feed-forward that are multiplied with its normed rows, all experts' in one."""
    found = [matrix for block in feed_forwards_of(layer) for matrix in (block.up, block.gate) if matrix]
    return found + (_routers(layer.experts) if layer.experts else [])


def downs_of(layer: LayerSizes) -> list[MatrixSize]:
    return [block.down for block in feed_forwards_of(layer)]


def feed_forwards_of(layer: LayerSizes) -> list[FeedForwardSizes]:
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
    return vector_bytes(sizes.vectors) + matrix_bytes(sizes.head)
