"""Sums and gathers over the ranks of tensor parallel, by torch.distributed.

On GPUs these are NCCL's, and the sums of a decode step those of our kernel (`peer_kernels.py`) or of torch's
symmetric memory, where every GPU can read the others' memory; all are captured in the graphs of steps.
Without CUDA they are gloo's, or our kernel's with files that all processes map.
"""

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from edgeinfer_kernels.cuda.driver import list_links
from edgeinfer_kernels.cuda.tensor.chunk_sums import ChunkSums
from edgeinfer_kernels.cuda.tensor.peer_memory import PeerInboxes, PeerRows
from edgeinfer_kernels.cuda.tensor.peer_trial import chunks_add_up, logits_are_gathered, steps_add_up
from edgeinfer_kernels.tensor_parts import Sums

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
PEERS, SYMMETRIC, NCCL, GLOO = "peer memory", "symmetric memory", "NCCL", "gloo"
UNSUPPORTED = (RuntimeError, ImportError, AttributeError, TypeError)
"""What a torch without symmetric memory, or with another interface of it, raises."""
Peers = TypeVar("Peers", PeerInboxes, PeerRows)


class TorchCollective:
    """The collective of a process group of torch.distributed, which this process has joined."""

    def __init__(self, device: torch.device, store: str = "", sums: Sums = "torch") -> None:
        """`store`: of the group. `sums`: "peers" computes those of a step in our kernel, "auto" does so on
        GPUs with NVLink, "torch" never.
        """
        self.rank = dist.get_rank()
        self.device = device
        self.peers: PeerInboxes | None = None
        self.logit_peers: PeerInboxes | None = None
        self._store = store
        self._symmetric = device.type == "cuda" and _have_symmetric_memory(device)
        has_link = sums == "auto" and self._symmetric and _have_atomics(device)
        self._tries_peers = sums == "peers" or has_link
        self._out: Tensor | None = None
        """The results of sums in symmetric memory."""

    @property
    def kind(self) -> str:
        """What computes the sums of a decode step."""
        if self.peers is not None:
            return PEERS
        if self._symmetric:
            return SYMMETRIC
        return NCCL if self.device.type == "cuda" else GLOO

    def shared(self, rows: Tensor, logits: int) -> Tensor:
        if self._tries_peers:
            tokens, columns = rows.shape
            self.peers = self._tried(
                lambda: PeerInboxes(tokens, columns, self.device, self._store), steps_add_up
            )
            if self.peers is not None:
                store = f"{self._store}.logits"
                self.logit_peers = self._tried(
                    lambda: PeerInboxes(tokens, logits, self.device, store), logits_are_gathered
                )
                return rows
        if not self._symmetric:
            return rows
        from torch.distributed import _symmetric_memory as symmetric_memory

        held = symmetric_memory.empty(rows.shape, dtype=rows.dtype, device=self.device)
        symmetric_memory.rendezvous(held, _group_name())
        held.zero_()
        self._out = torch.zeros_like(rows)
        return held

    def chunk_sums(self, tokens: int, columns: int) -> ChunkSums | None:
        if not self._tries_peers:
            return None
        store = f"{self._store}.chunk"
        peers = self._tried(lambda: PeerRows(tokens, columns, self.device, store), chunks_add_up)
        return None if peers is None else ChunkSums(peers, self.device)

    def _tried(self, create: Callable[[], Peers], is_right: Callable[[Peers], bool]) -> Peers | None:
        """Memory with which what all ranks exchange `is_right`; None: on some rank it doesn't work."""
        peers, works = None, False
        with suppress(*UNSUPPORTED):
            peers = create()
        if not _all_agree(peers is not None, self.device):
            return None
        assert peers is not None
        with suppress(RuntimeError):
            works = is_right(peers)
        return peers if _all_agree(works, self.device) else None

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
    except UNSUPPORTED:
        works = False
    return _all_agree(works, device)


def _have_atomics(device: torch.device) -> bool:
    """Whether all GPUs of the group have atomic operations on each other's memory, as NVLink has."""
    indices = set(_indices(device))
    own = [link for link in list_links(max(indices) + 1) if {link.first, link.second} <= indices]
    return _all_agree(all(link.has_atomics for link in own), device)


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
