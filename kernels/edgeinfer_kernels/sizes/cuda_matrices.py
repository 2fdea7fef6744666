"""Bytes of a decoder's weights and caches on a CUDA device, computed from its sizes, without torch or a GPU.

The counts match the allocations of `device_model.py` exactly; a test compares the two. Buffers are counted in
`cuda_buffers.py`.
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
"""Every allocation in device memory starts at a multiple of this many bytes."""
SPARE_POSITIONS = 16
"""Cache positions beyond the context, because a step writes whole tiles."""


def cache_positions(context: int) -> int:
    """Cache positions for this many tokens: always a multiple of SPARE_POSITIONS. Kernels are specialized for
    that, so all contexts use the same kernels.
    """
    return (-(-context // SPARE_POSITIONS) + 1) * SPARE_POSITIONS


def taken(elements: int, size: int) -> int:
    """Bytes of an allocation of `elements` of `size` bytes, rounded up to the alignment."""
    return -(-elements * size // ALIGNMENT) * ALIGNMENT


def padded_rows(rows: int) -> int:
    """Rows of a matrix including padding."""
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
    """Merge adjacent matrices of one format into one matrix with all their rows."""
    runs: list[MatrixSize] = []
    for matrix in matrices:
        if runs and runs[-1].format == matrix.format:
            top = runs.pop()
            matrix = MatrixSize(top.name, top.format, top.rows + matrix.rows, top.columns)
        runs.append(matrix)
    return runs


def attention_bytes(layer: LayerSizes) -> int:
    """Bytes of one layer's attention without its RoPE table. Raises `UnsupportedOnDeviceError`."""
    if layer.q.rows % ROW_MULTIPLE or layer.k.rows % ROW_MULTIPLE:
        raise UnsupportedOnDeviceError(
            f"{layer.k.name}: {layer.k.rows} rows (q: {layer.q.rows}), the GPU's kernels want a "
            f"multiple of {ROW_MULTIPLE}"
        )
    stack = sum(map(matrix_bytes, row_runs((layer.q, layer.k, layer.v))))
    return stack + matrix_bytes(layer.output) + vector_bytes(layer.vectors)


def rope_bytes(sizes: ModelSizes, context: int) -> int:
    """Bytes of the float32 cosines and sines of all positions; layers with the same RoPE share a table."""
    tables = {(layer.rope_table, layer.head_dim) for layer in sizes.layers}
    return sum(taken(cache_positions(context) * head_dim, 4) for _, head_dim in tables)


def feed_forward_bytes(sizes: FeedForwardSizes) -> int:
    """Bytes of one layer's dense feed-forward, or of one expert. Raises `UnsupportedOnDeviceError`."""
    biases = 2 * taken(padded_rows(sizes.neurons), 4) if sizes.biased else 0
    return sum(map(matrix_bytes, sizes.matrices())) + biases + vector_bytes(sizes.vectors)


def shared_bytes(experts: ExpertSizes) -> int:
    """Bytes of the parts that an MoE layer has once: the router in planes and as floats, the slot of each
    expert, and the shared expert with its gate.

    Raises `UnsupportedOnDeviceError`.
    """
    routers = sum(matrix_bytes(router) + taken(router.weights, 4) for router in _routers(experts))
    bias = taken(padded_rows(experts.count), 4) if experts.router_biased else 0
    places = taken(2 * experts.count, 4)
    return routers + places + bias + (feed_forward_bytes(experts.shared) if experts.shared else 0)


def _routers(experts: ExpertSizes) -> list[MatrixSize]:
    """The router, and the gate row of the shared expert."""
    weigher = MatrixSize("ffn_gate_inp_shexp", "F32", 1, experts.router.columns)
    return [experts.router, *([weigher] if experts.shared_weighed else [])]


def entered(layer: LayerSizes) -> list[MatrixSize]:
    """The matrices of a feed-forward that are multiplied with its normed input; all experts as one."""
    found = [matrix for block in feed_forwards_of(layer) for matrix in (block.up, block.gate) if matrix]
    return found + (_routers(layer.experts) if layer.experts else [])


def downs_of(layer: LayerSizes) -> list[MatrixSize]:
    return [block.down for block in feed_forwards_of(layer)]


def feed_forwards_of(layer: LayerSizes) -> list[FeedForwardSizes]:
    """A layer's feed-forwards; its experts as one, with stacked rows."""
    if layer.experts is None:
        return layer.feed_forwards()
    count, one = layer.experts.count, layer.experts.expert
    up, down = replace(one.up, rows=count * one.up.rows), replace(one.down, rows=count * one.down.rows)
    gate = one.gate and replace(one.gate, rows=count * one.gate.rows)
    shared = [layer.experts.shared] if layer.experts.shared else []
    return [FeedForwardSizes(up, down, gate), *shared]


def cache_bytes(layer: LayerSizes, context: int, kind: CacheType) -> int:
    """Bytes of one layer's KV cache: float16, or 8 or 4 bits per element with a float16 scale for 32."""
    rows = layer.kv_heads * cache_positions(context)
    width = layer.head_dim
    elements, size = {"f16": (width, 2), "q8_0": (width, 1), "q4_0": (-(-width // 8), 4)}[kind]
    scales = 0 if kind == "f16" else -(-width // 32)
    return 2 * (taken(rows * elements, size) + taken(rows * scales, 2))


def head_bytes(sizes: ModelSizes) -> int:
    """Bytes of the final norm and the head. Raises `UnsupportedOnDeviceError`."""
    return vector_bytes(sizes.vectors) + matrix_bytes(sizes.head)
