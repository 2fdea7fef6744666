"""Buffers for a batch of tokens, shared by all layers one after the other."""

from edgeinfer_kernels.cpu.memory import Arena, allocate
from edgeinfer_kernels.cpu.structures import CACHE_LINE


class Workspace:
    """Named rows for `batch` tokens; `nbytes` is what they take in all."""

    def __init__(self, arena: Arena, batch: int) -> None:
        self._arena = arena
        self._rows: dict[tuple[str, int], int] = {}
        self.batch = batch
        self.nbytes = 0

    def rows(self, name: str, row_bytes: int) -> tuple[int, int]:
        """(address, stride in bytes) of rows of `row_bytes`; the same memory for the same name and size."""
        stride = -(-row_bytes // CACHE_LINE) * CACHE_LINE
        if (name, stride) not in self._rows:
            memory = allocate(stride * self.batch)
            self.nbytes += memory.nbytes
            self._rows[name, stride] = self._arena.keep(memory)
        return self._rows[name, stride], stride
