"""Buffers for a batch of tokens, shared by all layers; their sizes are computed before allocation."""

from collections.abc import Callable

from edgeinfer_kernels.cpu.embedding import embedding_scratch
from edgeinfer_kernels.cpu.layout.file_rows import file_rows_scratch
from edgeinfer_kernels.cpu.layout.packed_matrix import Arena, allocate, is_float_format
from edgeinfer_kernels.cpu.runtime.abi import (
    CACHE_LINE,
    attention_pieces,
    attention_scratch,
    attention_states,
    quantized_bytes,
)
from edgeinfer_kernels.layer_cache import padded
from edgeinfer_kernels.sizes.model_sizes import ExpertSizes, ModelSizes

PAGE = 4096


def aligned(nbytes: int) -> int:
    """Bytes rounded up to whole cache lines."""
    return -(-nbytes // CACHE_LINE) * CACHE_LINE


def expert_rows(used: int) -> int:
    """Rows per token of the expert activations: one for each expert, plus the padding of partial tiles; an
    expert with fewer than TILE_TOKENS tokens has no padding.
    """
    return (3 * used + 1) // 2


def expert_workspace(experts: ExpertSizes) -> dict[str, int]:
    """Name -> bytes per token of the buffers that an MoE layer needs in addition to the shared ones."""
    used, block = experts.used, experts.expert
    rows, width, hidden = expert_rows(used), experts.router.columns, block.neurons
    found = {
        "expert.scores": 4 * padded(experts.count),
        "expert.ids": 8 * used,
        "expert.weights": 4 * used,
        "expert.places": 8 * used,
        "expert.entries": 8 * used,
        "expert.active": 8 + 24 * used,
        "expert.gathered.quantized": rows * aligned(quantized_bytes(padded(width))),
        "expert.hidden": rows * aligned(4 * padded(hidden)),
        "expert.hidden.quantized": rows * aligned(quantized_bytes(padded(hidden))),
        "expert.gate": rows * aligned(4 * padded(hidden)),
        "expert.out": rows * aligned(4 * padded(width)),
    }
    if any(is_float_format(matrix) for matrix in (block.up, block.gate) if matrix):
        found["expert.gathered"] = rows * aligned(4 * padded(width))
    if experts.early:
        found["router"] = 4 * padded(width)
        found["router.quantized"] = quantized_bytes(padded(width))
    return found


def workspace_rows(sizes: ModelSizes) -> dict[str, int]:
    """Name -> bytes per token of every buffer of a decoder's blocks; the largest layer determines the
    size.
    """
    rows = {"x": 4 * padded(sizes.width)}

    def need(name: str, nbytes: int) -> None:
        rows[name] = max(rows.get(name, 0), aligned(nbytes))

    def need_input(name: str, columns: int) -> None:
        need(name, 4 * padded(columns))
        need(f"{name}.quantized", quantized_bytes(padded(columns)))

    need_input("normed", sizes.width)
    need("projected", 4 * padded(sizes.width))
    for layer in sizes.layers:
        need_input("mixed", layer.heads * layer.head_dim)
        need("queries", 4 * layer.heads * padded(layer.head_dim))
        need("projected_q", 4 * padded(layer.q.rows))
        need("projected_k", 4 * padded(layer.k.rows))
        need("projected_v", 4 * padded(layer.v.rows))
        if layer.experts:
            for name, nbytes in expert_workspace(layer.experts).items():
                need(name, nbytes)
        dense = layer.experts.shared if layer.experts else layer.feed_forward
        if dense is not None:
            need_input("hidden", dense.neurons)
            need("gate", 4 * padded(dense.neurons))
    return rows


def whole_tiles(tokens: int) -> int:
    """Tokens rounded up to whole tiles of 16."""
    return -(-tokens // 16) * 16


def _widest(sizes: ModelSizes, size: Callable[[int, int], int]) -> int:
    """The largest `size(query heads per key head, padded head dimension)` of all layers, in whole pages."""
    most = max(size(layer.heads // layer.kv_heads, padded(layer.head_dim)) for layer in sizes.layers)
    return -(-most // PAGE) * PAGE


def group_offset(sizes: ModelSizes) -> int:
    """Offset in a thread's scratch at which file rows are interleaved: after the part for attention."""
    return _widest(sizes, attention_scratch)


def scratch_stride(sizes: ModelSizes, repack: bool) -> int:
    """Bytes of the scratch of one thread; the first thread's is also used by the embedding."""
    group = 0 if repack else file_rows_scratch(sizes.matrices())
    blocks = group_offset(sizes) + -(-group // PAGE) * PAGE
    return max(blocks, -(-embedding_scratch(sizes.table) // PAGE) * PAGE)


def states_bytes(sizes: ModelSizes, threads: int) -> int:
    """Bytes of the running sums of attention over KV splits."""
    most = max(
        attention_states(layer.heads // layer.kv_heads, padded(layer.head_dim))
        * attention_pieces(threads, layer.kv_heads)
        for layer in sizes.layers
    )
    return -(-most // PAGE) * PAGE


def workspace_bytes(sizes: ModelSizes, batch: int, threads: int, repack: bool = True) -> int:
    """Bytes of a `Workspace` with these arguments."""
    rows = sum(workspace_rows(sizes).values())
    scratch = threads * scratch_stride(sizes, repack) + states_bytes(sizes, threads)
    return whole_tiles(batch) * rows + scratch


class Workspace:
    """The buffers of `workspace_rows` for `batch` tokens, and scratch for `threads`."""

    def __init__(
        self,
        arena: Arena,
        sizes: ModelSizes,
        batch: int,
        threads: int,
        repack: bool = True,
    ) -> None:
        self._rows = {
            name: (arena.keep(allocate(stride * whole_tiles(batch))), stride)
            for name, stride in workspace_rows(sizes).items()
        }
        self.scratch_stride = scratch_stride(sizes, repack)
        self.scratch = arena.keep(allocate(self.scratch_stride * threads))
        self.states = arena.keep(allocate(states_bytes(sizes, threads)))

    def rows(self, name: str) -> tuple[int, int]:
        """(address, bytes per token) of a buffer."""
        return self._rows[name]
