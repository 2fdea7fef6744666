"""Memory of each rank that all can read and write: inboxes for steps, partial sums for prompts."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from edgeinfer_kernels.cuda.triton_ops.kernel_args import InboxArgs, PeerArgs

BUFFERS = 2
"""Buffers of partial sums, used in turn: the others may still read the last one."""
ALIGNMENT = 256


class PeerInboxes:
    """What the ranks send each other in a step, up to (tokens, columns) float32 from each; memory as that of
    `PeerRows`.
    """

    def __init__(self, tokens: int, columns: int, device: torch.device, store: str) -> None:
        self.tokens, self.columns, self.device = tokens, columns, device
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        nbytes = 2 * 8 * self.ranks * tokens * columns
        self._held, memory = memory_of_ranks(nbytes, device, store)
        self._inboxes = tuple(each.view(torch.int64) for each in memory)
        self._numbers = torch.zeros((tokens, columns), dtype=torch.int32, device=device)

    @property
    def args(self) -> InboxArgs:
        """What the kernels need."""
        inboxes, rank = self._inboxes, self.rank
        return InboxArgs(inboxes, inboxes[rank], self._numbers, rank, self.tokens, self.columns)


class PeerRows:
    """Buffers of partial sums (tokens, columns) float32 of all ranks, on GPUs in torch's symmetric memory.
    Without CUDA they are files named `store`, a dot and the rank, that all processes map. All ranks create
    theirs before any rank writes.
    """

    def __init__(self, tokens: int, columns: int, device: torch.device, store: str) -> None:
        self.tokens, self.rank, self.ranks = tokens, dist.get_rank(), dist.get_world_size()
        sums = BUFFERS * 4 * tokens * columns
        scales = _aligned(sums)
        numbers = _aligned(scales + BUFFERS * 4 * tokens)
        nbytes = numbers + 8 * self.ranks * tokens
        self._held, memory = memory_of_ranks(nbytes, device, store)
        self._all = [each[:sums].view(torch.float32).view(BUFFERS, tokens, columns) for each in memory]
        ends = scales + BUFFERS * 4 * tokens
        self._scales = [each[scales:ends].view(torch.float32).view(BUFFERS, tokens) for each in memory]
        self._arrived = [each[numbers:].view(torch.int64) for each in memory]
        self._numbers = torch.zeros(tokens, dtype=torch.int64, device=device)

    def own(self, number: int) -> Tensor:
        """The buffer in which this rank writes the partial sums of sum `number` of a chunk."""
        return self._all[self.rank][number % BUFFERS]

    def own_scales(self, number: int) -> Tensor:
        """The scales of the rows in `own`, (tokens,)."""
        return self._scales[self.rank][number % BUFFERS]

    def args(self, number: int) -> PeerArgs:
        """What the kernel of sum `number` needs."""
        rows, scales = (tuple(each[number % BUFFERS] for each in of) for of in (self._all, self._scales))
        arrived = tuple(self._arrived)
        return PeerArgs(rows, arrived, arrived[self.rank], self._numbers, self.rank, self.tokens, scales)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def memory_of_ranks(nbytes: int, device: torch.device, store: str) -> tuple[Tensor, list[Tensor]]:
    """What keeps the memory, and that of each rank, which has zeros."""
    return _on_gpus(nbytes, device) if device.type == "cuda" else _in_files(nbytes, store)


def _on_gpus(nbytes: int, device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """As `memory_of_ranks`. It is zero on this rank; the others' is when all have agreed to use it."""
    from torch.distributed import _symmetric_memory as symmetric_memory

    group: str = dist.group.WORLD.group_name
    held = symmetric_memory.empty((nbytes,), dtype=torch.uint8, device=device)
    handle = symmetric_memory.rendezvous(held, group)
    memory = [handle.get_buffer(rank, (nbytes,), torch.uint8) for rank in range(dist.get_world_size())]
    memory[dist.get_rank()].zero_()
    torch.cuda.synchronize(device)
    return held, memory


def _in_files(nbytes: int, store: str) -> tuple[Tensor, list[Tensor]]:
    """As `memory_of_ranks`."""
    paths = [f"{store}.{rank}" for rank in range(dist.get_world_size())]
    Path(paths[dist.get_rank()]).write_bytes(bytes(nbytes))
    dist.barrier()
    memory = [torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8) for path in paths]
    return memory[dist.get_rank()], memory
