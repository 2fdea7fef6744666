"""Bytes of LoRA adapters and of their buffers, without the adapters."""

from collections.abc import Mapping
from dataclasses import dataclass

from edgeinfer_kernels.caches.layer_cache import padded
from edgeinfer_kernels.sizes.cpu_workspace import buffered_tokens
from edgeinfer_kernels.sizes.cuda_buffers import MAX_TOKENS
from edgeinfer_kernels.sizes.model_sizes import ModelSizes

CPU_ONLY_PARTS = (".attn_k_b.", ".attn_v_b.")
"""Parts of names of tensors whose adapters run on the CPU only."""
MAX_SHARING = 3
"""Matrices that may share planes on a GPU: queries, keys and values."""
SLOTS = 2
"""Rows of products that a CPU thread needs at once for each token: those of gate and up."""


@dataclass(frozen=True)
class LoraSizes:
    """`cpu_bytes`: of all matrices in the layout of the CPU kernels; `ranks`: the largest rank, rounded up to
    whole lanes. `gpu_bytes`: at most, on a GPU; `cpu_only`: the tensor whose adapter no GPU kernel reads, if
    there is one.
    """

    cpu_bytes: int = 0
    ranks: int = 0
    gpu_bytes: int = 0
    cpu_only: str = ""
    has_experts: bool = False

    @classmethod
    def of(cls, pairs: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]) -> "LoraSizes":
        """The sizes of adapters whose a and b have these shapes: (…, rank, columns) and (…, rows, rank)."""
        cpu_bytes = gpu_bytes = ranks = 0
        cpu_only, has_experts = "", False
        for name, (a, b) in pairs.items():
            *experts, rank, columns = a
            count, rows = (experts[0] if experts else 1), b[-2]
            has_experts = has_experts or bool(experts)
            cpu_bytes += 4 * count * (padded(rank) * _by_four(columns) + padded(rows) * _by_four(rank))
            gpu_bytes += (
                count * padded(rank) * (6 * padded(columns) + 4 * MAX_SHARING * padded(rows) + 4 * MAX_TOKENS)
            )
            ranks = max(ranks, padded(rank))
            if any(part in name for part in CPU_ONLY_PARTS):
                cpu_only = cpu_only or name
        return cls(cpu_bytes, ranks, gpu_bytes, cpu_only, has_experts)

    def cpu_total(self, sizes: ModelSizes, batch: int, threads: int) -> int:
        """Bytes of the matrices, and of the products of the threads."""
        return self.cpu_bytes + product_bytes(self.ranks, buffered_tokens(sizes, batch)) * threads

    @property
    def gpu_refusal(self) -> str | None:
        """Why a model with them uses no GPU; None: it can."""
        return f"the LoRA adapter of {self.cpu_only} runs on the CPU only" if self.cpu_only else None


def _by_four(count: int) -> int:
    return -(-count // 4) * 4


def product_bytes(ranks: int, tokens: int) -> int:
    """Bytes of the products of one CPU thread."""
    return SLOTS * 4 * ranks * tokens
