"""Buffers for a batch of tokens, shared by all layers; their sizes are computed before allocation."""

from typing import NamedTuple

from edgeinfer_kernels.blocks.embedding.draft_input import HEAD_BATCH
from edgeinfer_kernels.caches.layer_cache import padded
from edgeinfer_kernels.cpu.embedding import embedding_scratch
from edgeinfer_kernels.cpu.layout.file_rows import file_rows_scratch
from edgeinfer_kernels.cpu.layout.packed_matrix import Arena
from edgeinfer_kernels.cpu.runtime.abi import CACHE_LINE, RING_ROWS, STEP_TOKENS, quantized_bytes
from edgeinfer_kernels.pages import allocate
from edgeinfer_kernels.sizes.model_sizes import ModelSizes

PAGE = 4096
OWN_COLUMNS_PER_THREAD = 32
"""Columns of x that a thread reads from other cores and normalizes in the time by which one more thread
lengthens a barrier: on 16 cores two rows of 512 took less time than a barrier, three more.
"""


def aligned(nbytes: int) -> int:
    """Bytes rounded up to whole cache lines."""
    return -(-nbytes // CACHE_LINE) * CACHE_LINE


def workspace_rows(sizes: ModelSizes) -> dict[str, int]:
    """Name -> bytes per token of every buffer of a decoder's blocks; the largest block determines the
    size.
    """
    width = sizes.hidden_size
    rows = {
        "x": 4 * padded(width),
        "normed": aligned(4 * padded(width)),
        "normed.quantized": aligned(quantized_bytes(padded(width))),
        "projected": aligned(4 * padded(width)),
    }
    for block in sizes.blocks:
        for name, nbytes in block.cpu_buffers(width).items():
            rows[name] = max(rows.get(name, 0), aligned(nbytes))
    if "gate" in rows:  # Kernels of feed-forwards read gates at the distance of the hidden rows.
        rows["gate"] = max(rows["gate"], rows["hidden"])
    return rows


def whole_tiles(tokens: int) -> int:
    """Tokens rounded up to whole tiles of 16."""
    return -(-tokens // 16) * 16


def buffered_tokens(sizes: ModelSizes, batch: int) -> int:
    """Rows of the buffers: those of a batch, and of positions that a recurrent state processes again."""
    pending = RING_ROWS if sizes.is_recurrent else 0
    return whole_tiles(batch) + pending


def group_offset(sizes: ModelSizes) -> int:
    """Offset in a thread's scratch at which file rows are interleaved: after the part for the blocks."""
    max_bytes = max((block.cpu_scratch() for block in sizes.blocks), default=0)
    return -(-max_bytes // PAGE) * PAGE


def scratch_stride(sizes: ModelSizes, repack: bool) -> int:
    """Bytes of the scratch of one thread; the first thread's is also used by the embedding."""
    group = 0 if repack else file_rows_scratch(sizes.matrices())
    blocks = group_offset(sizes) + -(-group // PAGE) * PAGE
    tables = [sizes.table, *([] if sizes.per_layer is None else [sizes.per_layer])]
    return max(blocks, *(-(-embedding_scratch(table) // PAGE) * PAGE for table in tables))


def states_bytes(sizes: ModelSizes, threads: int) -> int:
    """Bytes of the partial results that threads exchange."""
    max_bytes = max((block.cpu_states(threads) for block in sizes.blocks), default=0)
    return -(-max_bytes // PAGE) * PAGE


def own_tokens(width: int, threads: int) -> int:
    """Maximum tokens of a step whose normed rows each thread computes itself. Of one token any other thread
    would compute them as long; of more tokens a barrier may take less time.
    """
    return min(STEP_TOKENS, 1 + threads * OWN_COLUMNS_PER_THREAD // width) if threads > 1 else 0


def own_bytes(sizes: ModelSizes, threads: int) -> int:
    """Bytes of these rows of all threads but the first, whose rows are the shared ones."""
    rows = workspace_rows(sizes)
    row = rows["normed"] + rows["normed.quantized"]
    return max(0, threads - 1) * own_tokens(sizes.hidden_size, threads) * row


def workspace_bytes(sizes: ModelSizes, batch: int, threads: int, repack: bool = True) -> int:
    """Bytes of a `Workspace` with these arguments."""
    rows = sum(workspace_rows(sizes).values())
    scratch = threads * scratch_stride(sizes, repack) + states_bytes(sizes, threads)
    scratch += own_bytes(sizes, threads)
    return buffered_tokens(sizes, batch) * rows + scratch


def observed_bytes(head: ModelSizes, batch: int) -> int:
    """Bytes of hidden states of its target that a draft head on the CPU needs which fuses several layers:
    those of a step of `batch` tokens, and those that wait for the head; and of its decoded matrix.
    """
    decoded = 0 if head.decoded is None else head.decoded.rows * head.decoded.columns
    states = sum(columns * (batch + 2 * HEAD_BATCH) for columns in head.fused_widths)
    return 4 * (states + decoded)


class OwnRows(NamedTuple):
    """Normed rows of each thread but the first, `tokens` of each, from an address on; bytes of a float32 and
    of a quantized row.
    """

    start: int
    threads: int
    tokens: int
    float_bytes: int
    quantized_bytes: int

    def of(self, thread: int) -> tuple[int, int]:
        """The addresses of the float32 and of the quantized rows of a thread."""
        floats = self.tokens * self.float_bytes
        at = self.start + (thread - 1) * (floats + self.tokens * self.quantized_bytes)
        return at, at + floats


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
        tokens = buffered_tokens(sizes, batch)
        self._rows = {
            name: (arena.keep(allocate(stride * tokens)), stride)
            for name, stride in workspace_rows(sizes).items()
        }
        self.scratch_stride = scratch_stride(sizes, repack)
        self.scratch = arena.keep(allocate(self.scratch_stride * threads))
        self.states = arena.keep(allocate(states_bytes(sizes, threads)))
        self.own_rows: OwnRows | None = None
        """None: there is one thread."""
        if threads > 1:
            start = arena.keep(allocate(own_bytes(sizes, threads)))
            strides = self._rows["normed"][1], self._rows["normed.quantized"][1]
            self.own_rows = OwnRows(start, threads, own_tokens(sizes.hidden_size, threads), *strides)

    def rows(self, name: str) -> tuple[int, int]:
        """(address, bytes per token) of a buffer."""
        return self._rows[name]
