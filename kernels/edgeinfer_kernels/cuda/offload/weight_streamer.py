"""Streams the host's weights to a device during prefill: raw bytes, at link speed.

Copies run on a separate stream into a ring of device buffers, so that the next transfer overlaps with
computation. The host memory is pinned in place; memory that cannot be pinned is copied through the same
number of pinned buffers.
"""

from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import torch
from torch import Tensor

from edgeinfer_kernels.cuda.device_memory import COPY_THREADS, Arena
from edgeinfer_kernels.sizes.cuda_buffers import STREAMED_PIECES

PORTABLE = 1
"""CUDA's flag of pinned memory for all devices: cudaHostRegisterPortable."""


class WeightStreamer:
    """Device memory for STREAMED_PIECES pieces of `piece_bytes` from the arena; call `connect` with the host
    memory first, and `begin` before each chunk.
    """

    def __init__(self, arena: Arena, piece_bytes: int) -> None:
        self.piece_bytes = piece_bytes
        self._pieces = [arena.take((piece_bytes,), torch.uint8) for _ in range(STREAMED_PIECES)]
        self._lock = 0
        self._pinned: dict[int, Tensor] = {}
        self._ring: list[Tensor] = []
        self._pool: ThreadPoolExecutor | None = None
        self._stream: torch.cuda.Stream | None = None
        self._main: torch.cuda.Stream | None = None

    def connect(self, memories: Iterable[Tensor]) -> int:
        """Pin the memory of the weights; return how many bytes could not be pinned."""
        device = self._pieces[0].device
        if device.type != "cuda":
            return 0
        self._stream = torch.cuda.Stream(device)
        self._arrived = [torch.cuda.Event() for _ in self._pieces]
        self._free = [torch.cuda.Event() for _ in self._pieces]
        refused = self.pin(memories)
        if refused:
            self._pool = ThreadPoolExecutor(COPY_THREADS)
            self._ring = [
                torch.empty(self.piece_bytes, dtype=torch.uint8, pin_memory=True) for _ in self._pieces
            ]
        return refused

    def pin(self, memories: Iterable[Tensor]) -> int:
        """Pin memory in place, until `close`; return how many bytes could not be pinned."""
        refused = 0
        for memory in memories if self._pieces[0].device.type == "cuda" else ():
            if pin_in_place(memory, self._pieces[0].device):
                self._pinned[memory.data_ptr()] = memory
            else:
                refused += memory.numel()
        return refused

    def begin(self) -> None:
        """Call before a chunk: streamed data is for the stream that is current now."""
        if self._stream is not None:
            self._main = torch.cuda.current_stream(self._pieces[0].device)

    def send(self, memory: Tensor, spans: Sequence[tuple[int, int]]) -> Tensor:
        """Stream bytes first…last of each span of `memory`, concatenated, at most `piece_bytes`.

        Kernels launched from now on can read the result. It is valid until `done`, after which the buffer may
        be reused.
        """
        self._lock = (self._lock + 1) % len(self._pieces)
        nbytes = sum(last - first for first, last in spans)
        piece = self._pieces[self._lock][:nbytes]
        if self._stream is None or self._main is None:
            self._copy(memory, spans, piece)
            return piece
        arrived = self._arrived[self._lock]
        if memory.data_ptr() not in self._pinned:
            arrived.synchronize()
            staged = self._ring[self._lock][:nbytes]
            self._stage(memory, spans, staged)
            memory, spans = staged, [(0, nbytes)]
        self._stream.wait_event(self._free[self._lock])
        torch.cuda.set_stream(self._stream)  # A `with` block takes several times as long.
        try:
            self._copy(memory, spans, piece)
        finally:
            torch.cuda.set_stream(self._main)
        arrived.record(self._stream)
        self._main.wait_event(arrived)
        return piece

    @staticmethod
    def _copy(memory: Tensor, spans: Sequence[tuple[int, int]], to: Tensor) -> None:
        at = 0
        for first, last in spans:
            to[at : at + last - first].copy_(memory[first:last], non_blocking=True)
            at += last - first

    def _stage(self, memory: Tensor, spans: Sequence[tuple[int, int]], to: Tensor) -> None:
        """The same within main memory, with several threads."""
        assert self._pool is not None
        moves, at = [], 0
        for first, last in spans:
            step = -(-(last - first) // COPY_THREADS)
            for begin in range(first, last, step):
                end = min(begin + step, last)
                moves.append((to[at : at + end - begin].numpy(), memory[begin:end].numpy()))
                at += end - begin

        def move(index: int) -> None:
            target, source = moves[index]
            target[:] = source

        list(self._pool.map(move, range(len(moves))))

    def done(self) -> None:
        """Call when all kernels that read the last transfer have been launched."""
        if self._main is not None:
            self._free[self._lock].record(self._main)

    def close(self) -> None:
        """Wait for running transfers and release pinned memory."""
        if self._stream is not None:
            torch.cuda.synchronize(self._pieces[0].device)
        if self._pool is not None:
            self._pool.shutdown()
        for memory in self._pinned.values():
            unpin(memory)
        self._pinned.clear()
        self._ring.clear()


def pin_in_place(memory: Tensor, device: torch.device) -> bool:
    """Pin memory in place, for all devices; False: the system refused. `device`: one that will read it."""
    status = torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), PORTABLE)
    if int(status) == 0:
        return True
    with suppress(RuntimeError):  # Otherwise the error would be raised by the next launch.
        torch.ones(1, device=device)
    return False


def unpin(memory: Tensor) -> None:
    """Undo `pin_in_place`."""
    torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())
