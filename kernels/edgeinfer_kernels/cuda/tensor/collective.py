"""Sums and gathers over the ranks of tensor parallel, by torch.distributed.

On GPUs these are NCCL's, and the sums of a decode step those of torch's symmetric memory, where every GPU can
read the others' memory; both are captured in the graphs of steps. Without CUDA they are gloo's.
"""

import os
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "NCCL_SOCKET_IFNAME": "lo",
    "GLOO_SOCKET_IFNAME": "lo",
}
"""Of the processes of ranks: no NVLink multicast, no network but that of this machine, and no thread of torch
that ends a rank.
"""
SYMMETRIC, NCCL, GLOO = "symmetric memory", "NCCL", "gloo"


class Collective(Protocol):
    """What a rank's step and prompts need of the other ranks. All ranks call the same methods in order."""

    rank: int

    def shared(self, rows: Tensor) -> Tensor:
        """A buffer of the shape of `rows` whose sums are the fastest; may be `rows` itself."""
        ...

    def sum_of_step(self, rows: Tensor) -> Tensor:
        """The sum over the ranks of the first rows of a `shared` buffer."""
        ...

    def add_up(self, rows: Tensor) -> None:
        """rows = their sum over the ranks."""
        ...

    def gather(self, own: Tensor, gathered: Tensor) -> None:
        """gathered = the elements `own` of each rank, one rank after another; all have the same number."""
        ...


class Alone:
    """A collective that exchanges nothing, for measurements of one rank: they take another number of steps on
    each.
    """

    rank = 0

    def shared(self, rows: Tensor) -> Tensor:
        return rows

    def sum_of_step(self, rows: Tensor) -> Tensor:
        return rows

    def add_up(self, rows: Tensor) -> None:
        """There are no other ranks."""

    def gather(self, own: Tensor, gathered: Tensor) -> None:
        """As `add_up`."""


class TorchCollective:
    """The collective of a process group of torch.distributed, which this process has joined."""

    def __init__(self, device: torch.device) -> None:
        self.rank = dist.get_rank()
        self.device = device
        self._symmetric = device.type == "cuda" and _have_symmetric_memory(device)
        self._out: Tensor | None = None
        """The results of sums in symmetric memory."""

    @property
    def kind(self) -> str:
        """What computes the sums of a decode step."""
        if self._symmetric:
            return SYMMETRIC
        return NCCL if self.device.type == "cuda" else GLOO

    def shared(self, rows: Tensor) -> Tensor:
        if not self._symmetric:
            return rows
        from torch.distributed import _symmetric_memory as symmetric_memory

        held = symmetric_memory.empty(rows.shape, dtype=rows.dtype, device=self.device)
        symmetric_memory.rendezvous(held, _group_name())
        held.zero_()
        self._out = torch.zeros_like(rows)
        return held

    def sum_of_step(self, rows: Tensor) -> Tensor:
        if self._out is None:
            dist.all_reduce(rows)
            return rows
        out = self._out[: len(rows)]
        torch.ops.symm_mem.one_shot_all_reduce_out(rows, "sum", _group_name(), out)
        return out

    def add_up(self, rows: Tensor) -> None:
        dist.all_reduce(rows)

    def gather(self, own: Tensor, gathered: Tensor) -> None:
        dist.all_gather_into_tensor(gathered, own)


def join_group(device: torch.device, store: str, rank: int, ranks: int) -> None:
    """Join the process group of the ranks; `store`: a file that all of them use. Waits for the others."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    on_gpu = device.type == "cuda"
    dist.init_process_group(
        "nccl" if on_gpu else "gloo",
        store=dist.FileStore(store, ranks),
        rank=rank,
        world_size=ranks,
        device_id=device if on_gpu else None,
    )


def can_sum_on_gpus() -> bool:
    """Whether torch has NCCL, which it hasn't on Windows."""
    return bool(dist.is_available() and dist.is_nccl_available())


def _group_name() -> str:
    name: str = dist.group.WORLD.group_name
    return name


def _have_symmetric_memory(device: torch.device) -> bool:
    """Whether all ranks can read each other's memory, tried with a buffer; all ranks get the same result."""
    works = all(
        index == device.index or torch.cuda.can_device_access_peer(device.index, index)
        for index in _indices(device)
    )
    if not _all_agree(works, device):
        return False
    try:
        from torch.distributed import _symmetric_memory as symmetric_memory

        tried = symmetric_memory.empty((4, 1024), dtype=torch.float32, device=device)
        symmetric_memory.rendezvous(tried, _group_name())
        tried.fill_(1.0)
        out = torch.zeros_like(tried)
        torch.ops.symm_mem.one_shot_all_reduce_out(tried, "sum", _group_name(), out)
        works = bool((out == dist.get_world_size()).all())
    except (RuntimeError, ImportError, AttributeError, TypeError):
        works = False
    return _all_agree(works, device)


def _indices(device: torch.device) -> Sequence[int]:
    """The GPUs of all ranks."""
    own = torch.tensor([device.index], dtype=torch.int32, device=device)
    gathered = torch.empty(dist.get_world_size(), dtype=torch.int32, device=device)
    dist.all_gather_into_tensor(gathered, own)
    return [int(index) for index in gathered.tolist()]


def _all_agree(works: bool, device: torch.device) -> bool:
    """Whether it works on every rank."""
    flag = torch.tensor([int(works)], dtype=torch.int32, device=device)
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag.item())
