"""Bytes of LoRA adapters and of their buffers, without the adapters."""

from collections.abc import Iterable
from dataclasses import dataclass

from edgeinfer_kernels.layer_cache import padded
from edgeinfer_kernels.sizes.cpu_workspace import buffered_tokens
from edgeinfer_kernels.sizes.model_sizes import ModelSizes

SLOTS = 2
"""Rows of products that a CPU thread needs at once for each token: those of gate and up."""


@dataclass(frozen=True)
class LoraSizes:
    """`cpu_bytes`: of all matrices in the layout of the CPU kernels; `ranks`: the largest rank, rounded up to
    whole lanes.
    """

    cpu_bytes: int = 0
    ranks: int = 0

    @classmethod
    def of(cls, pairs: Iterable[tuple[tuple[int, ...], tuple[int, ...]]]) -> "LoraSizes":
        """The sizes of adapters whose a and b have these shapes: (…, rank, columns) and (…, rows, rank)."""
        cpu_bytes = ranks = 0
        for a, b in pairs:
            *experts, rank, columns = a
            count = experts[0] if experts else 1
            cpu_bytes += 4 * count * (padded(rank) * -(-columns // 4) * 4 + padded(b[-2]) * rank)
            ranks = max(ranks, padded(rank))
        return cls(cpu_bytes, ranks)

    def cpu_total(self, sizes: ModelSizes, batch: int, threads: int) -> int:
        """Bytes of the matrices, and of the products of the threads."""
        return self.cpu_bytes + product_bytes(self.ranks, buffered_tokens(sizes, batch)) * threads


def product_bytes(ranks: int, tokens: int) -> int:
    """Bytes of the products of one CPU thread."""
    return SLOTS * 4 * ranks * tokens
