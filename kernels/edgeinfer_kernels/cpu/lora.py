"""Sets LoRA adapters of a decoder on the CPU: structures that the kernels read, outside of its weights."""

import numpy as np

from edgeinfer_kernels.caches.layer_cache import padded
from edgeinfer_kernels.cpu.block_builder import AdaptableMatrix, BlockBuilder
from edgeinfer_kernels.cpu.embedding import Embedding
from edgeinfer_kernels.cpu.layout.fields import ROWS_PER_GROUP
from edgeinfer_kernels.cpu.layout.packed_matrix import Arena, padded_rows
from edgeinfer_kernels.cpu.runtime.kernel_args import InputArgs, LoraArgs, MatrixArgs
from edgeinfer_kernels.lora.sizes import SLOTS, product_bytes
from edgeinfer_kernels.lora.weights import Floats, LoraError, LoraWeights, ModelLora
from edgeinfer_kernels.pages import allocate


def interleaved(rows: Floats) -> Floats:
    """(experts, rows, columns) with sixteen rows of a column adjacent; zero-padded to whole groups."""
    experts, count, columns = rows.shape
    groups = -(-count // ROWS_PER_GROUP)
    whole = np.zeros((experts, groups * ROWS_PER_GROUP, columns), np.float32)
    whole[:, :count] = rows
    grouped = whole.reshape(experts, groups, ROWS_PER_GROUP, columns)
    return np.ascontiguousarray(grouped.transpose(0, 1, 3, 2))


class LoraArena:
    """The memory of the adapters that are set; it is replaced when others are set.

    `tokens`: rows of the buffers of a step.
    """

    def __init__(self, lora: ModelLora, threads: int, tokens: int) -> None:
        self._arena = Arena()
        self._args: dict[tuple[int, float], int] = {}
        ranks = max((padded(each.rank) for each in lora.matrices.values()), default=0)
        self._thread_bytes = product_bytes(ranks, tokens)
        self._slot_bytes = self._thread_bytes // SLOTS
        self._products = self._arena.keep(allocate(max(1, threads * self._thread_bytes)))

    def args(self, adaptable: AdaptableMatrix, weights: LoraWeights) -> int:
        """A LoraArgs structure; matrices with several structures share it."""
        key = id(adaptable.matrix), adaptable.scale
        if key not in self._args:
            a = interleaved(_columns_by_four(weights.a))
            b = interleaved(_columns_by_four(weights.b / np.float32(adaptable.scale)))
            self._args[key] = self._arena.fill(
                LoraArgs,
                a=self._arena.keep(a),
                b=self._arena.keep(b),
                rank=b.shape[2],
                ranks=padded(weights.rank),
                columns=a.shape[2],
                a_stride=a[0].nbytes,
                b_stride=b[0].nbytes,
                products=self._products,
                slot_bytes=self._slot_bytes,
                thread_bytes=self._thread_bytes,
            )
        return self._args[key]

    def embedding(self, weights: LoraWeights) -> int:
        """A LoraArgs structure of the embedding."""
        a, b = padded_rows(weights.a[0]), np.ascontiguousarray(weights.b[0])
        keep = self._arena.keep
        return self._arena.fill(LoraArgs, a=keep(a), b=keep(b), rank=weights.rank, columns=a.shape[1])

    def keep(self, nbytes: int) -> int:
        """Address of a new buffer."""
        return self._arena.keep(allocate(nbytes))


def _columns_by_four(rows: Floats) -> Floats:
    """The rows with columns zero-padded to a multiple of four, as the kernel reads them."""
    return np.pad(rows, ((0, 0), (0, 0), (0, -rows.shape[2] % 4)))


def set_lora(
    lora: ModelLora, builder: BlockBuilder, embedding: Embedding, threads: int, tokens: int
) -> LoraArena:
    """Let all structures of the builder use these adapters, and no others; the result is their memory.

    Raises `LoraError`: the kernel of one of the matrices doesn't read adapters.
    """
    adaptable = {id(each.matrix) for each in builder.adaptable}
    for key, weights in lora.matrices.items():
        if key not in adaptable:
            raise LoraError(f"{weights.name}: its kernel on the CPU takes no adapter")
    arena, rows = LoraArena(lora, threads, tokens), lora.embedding
    found = [lora.matrices.get(id(each.matrix)) for each in builder.adaptable]
    args = [
        0 if weights is None else arena.args(each, weights)
        for each, weights in zip(builder.adaptable, found, strict=True)
    ]
    of_embedding = 0 if rows is None else arena.embedding(rows)
    has_experts = any(weights is not None and len(weights.a) > 1 for weights in found)
    _set_assignment_rows(builder, arena, has_experts, tokens)
    for each, address in zip(builder.adaptable, args, strict=True):
        MatrixArgs.from_address(each.args).lora = address
    embedding.set_lora(rows, of_embedding)
    return arena


def _set_assignment_rows(builder: BlockBuilder, arena: LoraArena, needed: bool, tokens: int) -> None:
    """Give the inputs of token-expert assignments float32 rows if adapters read them."""
    found = [(InputArgs.from_address(args), rows) for args, rows in builder.assignment_inputs]
    nbytes = max((args.float_stride * rows * tokens for args, rows in found), default=0)
    buffer = arena.keep(nbytes) if needed and nbytes else 0
    for args, _ in found:
        args.floats = buffer
