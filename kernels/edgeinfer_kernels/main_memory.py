"""The base of backends whose state is in main memory."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.backend import PAGE, Backend, StateArrays, X
from edgeinfer_kernels.caches.tree_pages import TreePages
from edgeinfer_kernels.decoder_state import DecoderState, PageParts


class MainMemoryBackend(Backend[X]):
    """A backend whose state is in main memory, with pages."""

    state: DecoderState

    @property
    def state_nbytes(self) -> int:
        return self.state.nbytes

    def snapshot(self, end: int) -> StateArrays:
        return self.state.snapshot(end)

    def restore(self, arrays: Sequence[npt.NDArray[np.generic]], end: int) -> None:
        self.state.restore_all(arrays, end)

    def checkpoint(self) -> None:
        self.state.checkpoint()

    def rewind(self, length: int) -> int:
        return self.state.rewind(length)

    def reach(self, length: int) -> int:
        return length if self.state.slots is None else self.state.slots.reach(length)

    def is_at(self, position: int) -> bool:
        return self.state.slots is None or self.state.slots.is_next(position)

    def copy_positions(self, source: int, target: int, count: int) -> None:
        self.state.copy(source, target, count)

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.state.copy_pages(sources, targets)

    def read_pages(self, pages: Sequence[int]) -> list[PageParts]:
        return self.state.read_pages(pages)

    def write_pages(self, pages: Sequence[int], contents: Sequence[PageParts]) -> None:
        self.state.write_pages(pages, contents)

    def evict(self, positions: npt.NDArray[np.int64], end: int) -> None:
        self.state.evict(positions, end)

    def forward_tree(self, x: X, start: int, parents: Sequence[int]) -> None:
        pages = TreePages(parents, start)
        self.state.copy_cached(pages.copied_text())
        self.forward_batch(x, pages.batch())

    def tree_end(self, start: int, parents: Sequence[int]) -> int:
        return TreePages(parents, start).end_page * PAGE

    def keep_path(self, start: int, parents: Sequence[int], rows: Sequence[int]) -> None:
        self.state.keep_path(start, rows, TreePages(parents, start).moves(rows))
