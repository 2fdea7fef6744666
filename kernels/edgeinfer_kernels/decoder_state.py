"""The state of a decoder's blocks in main memory, which later tokens need, and the record of a step's
experts.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.blocks.common.block import BlockState
from edgeinfer_kernels.blocks.moe import MoeSpec
from edgeinfer_kernels.caches.cache_state import CacheState
from edgeinfer_kernels.caches.cache_types import CacheType, has_recent
from edgeinfer_kernels.caches.layer_cache import LANES, RECENT_PAGES_PER_SEQUENCE, LayerCache
from edgeinfer_kernels.caches.recent_pages import RecentCache, RecentPages, recent_slots
from edgeinfer_kernels.decoder import BlockIndex, DecoderSpec
from edgeinfer_kernels.recurrent_state import RecurrentState, RecurrentStep, StateSlots

PageParts = list[npt.NDArray[np.uint8]]
"""The bytes of a cache page in main memory: (bytes,) of each device that has a part of it."""


def check_evicted(positions: npt.NDArray[np.int64], end: int) -> None:
    """Raise `ValueError` if some of `positions` do not exist or are not ascending."""
    if len(positions) == 0 or positions[0] < 0 or positions[-1] >= end or (np.diff(positions) <= 0).any():
        raise ValueError(f"saw positions {positions[:3]}… to evict, wanted rising ones of {end}")


@dataclass(frozen=True)
class DecoderState:
    """The states of some blocks, in the order of the blocks."""

    blocks: Mapping[BlockIndex, BlockState] = field(default_factory=dict)
    slots: StateSlots | None = None
    """The slots of recurrent states; None: no block here has one."""
    sources: Mapping[BlockIndex, BlockIndex] = field(default_factory=dict)
    """The blocks that read the state of another one."""
    recent: RecentPages | None = None
    """The recent positions of KV caches in f16; None: they have none."""

    @classmethod
    def allocate(
        cls,
        spec: DecoderSpec,
        context: int,
        kind: CacheType = "f16",
        indices: Sequence[BlockIndex] | None = None,
        sequences: int = 1,
    ) -> "DecoderState":
        """The zeroed state for `context` tokens of these blocks; None: of all. `sequences`: whose recent
        positions are held at once.
        """
        states, sources = {}, {}
        for index in spec.indices() if indices is None else indices:
            source = spec.state_source(index)
            if source != index:
                sources[index] = source
            state = spec.residual(index).block.allocate_state(context, kind)
            if state is not None:
                has_f16 = isinstance(state, CacheState) and has_recent(kind)
                states[index] = state.with_recent(sequences) if has_f16 else state
        is_recurrent = any(spec.residual(index).block.recurrent for index in states)
        slots = StateSlots(spec.slots) if is_recurrent else None
        pages = LayerCache.positions_for(context) // LANES
        recent = None
        if has_recent(kind):
            recent = RecentPages(_caches(states.values()), pages, recent_slots(sequences))
        return cls(states, slots, sources, recent)

    def pooled(self, count: int) -> "StatePool":
        """`count` zeroed states like this one, in common arrays."""
        pooled = {index: block.pooled(count) for index, block in self.blocks.items()}
        states = list[DecoderState]()
        for number in range(count):
            blocks = {index: parts[number] for index, (_, parts) in pooled.items()}
            slots = None if self.slots is None else StateSlots(self.slots.count)
            recent = None
            if self.recent is not None:
                pages, first = len(self.recent.table), RECENT_PAGES_PER_SEQUENCE * number
                recent = RecentPages(_caches(blocks.values()), pages, recent_slots(1), first=first)
            states.append(DecoderState(blocks, slots, self.sources, recent))
        joined = {index: whole for index, (whole, _) in pooled.items()}
        return StatePool(states, DecoderState(joined, None, self.sources))

    @staticmethod
    def nbytes_for(spec: DecoderSpec, context: int, kind: CacheType) -> int:
        """Bytes that `allocate` takes for all blocks."""
        blocks = [residual.block for layer in spec.layers for residual in layer.blocks]
        return sum(block.state_nbytes(context, kind) for block in blocks)

    def get(self, index: BlockIndex) -> BlockState | None:
        """The state that a block reads; None: it has none here."""
        return self.blocks.get(self.sources.get(index, index))

    @property
    def nbytes(self) -> int:
        return sum(state.nbytes for state in self.blocks.values())

    def snapshot(self, end: int) -> list[npt.NDArray[np.generic]]:
        """The first `end` positions of all blocks: views of KV caches, and copies of recurrent states, whose
        `StateSlots.description` comes first.
        """
        slots, description = snapshot_slots(self.slots)
        return [*description, *(view for state in self.blocks.values() for view in state.views(end, slots))]

    def restore(self, arrays: Sequence[npt.NDArray[np.generic]], end: int) -> int:
        """Restore the first `end` positions from the arrays of a `snapshot`, which may hold more of both;
        return the number of arrays used.

        Raises:
            ValueError: the arrays have other shapes or dtypes.
        """
        slots = restored_slots(self.slots, arrays)
        arrays = arrays[self.slots is not None :]
        views = [view for state in self.blocks.values() for view in state.views(end, slots)]
        trimmed = [array[:, : view.shape[1]] for view, array in zip(views, arrays, strict=False)]
        if [(each.shape, each.dtype) for each in trimmed] != [(each.shape, each.dtype) for each in views]:
            raise ValueError("the snapshot is of another cache")
        for view, array in zip(views, trimmed, strict=True):
            view[...] = array
        if self.recent is not None:
            self.recent.drop()
        return len(views) + (self.slots is not None)

    def begin(self, start: int, tokens: int) -> RecurrentStep:
        """The slots of a step; see `StateSlots.begin`."""
        return RecurrentStep() if self.slots is None else self.slots.begin(start, tokens)

    def checkpoint(self) -> None:
        """As `Backend.checkpoint`."""
        if self.slots is not None:
            self.slots.checkpoint()

    def rewind(self, length: int) -> int:
        """As `Backend.rewind`."""
        return length if self.slots is None else self.slots.rewind(length)

    def restore_all(self, arrays: Sequence[npt.NDArray[np.generic]], end: int) -> None:
        """As `restore`. Raises `ValueError` too if arrays are left over."""
        if self.restore(arrays, end) != len(arrays):
            raise ValueError("the snapshot is of another cache")

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy `count` positions in all blocks; the ranges must not overlap."""
        for state in self.blocks.values():
            state.copy(source, target, count)
        if self.recent is not None:
            self.recent.copy(source, target, count)

    def copy_cached(self, moves: Iterable[tuple[int, int, int]]) -> None:
        """Copy positions, (source, target, count), in the caches: recurrent states have none."""
        cached = [state for state in self.blocks.values() if not isinstance(state, RecurrentState)]
        for move in moves:
            for state in cached:
                state.copy(*move)
            if self.recent is not None:
                self.recent.copy(*move)

    def keep_path(self, start: int, rows: Sequence[int], moves: Iterable[tuple[int, int, int]]) -> None:
        """As `Backend.keep_path`; `moves`: of positions in the caches, as `copy_cached`."""
        self.copy_cached(moves)
        if self.slots is not None:
            for state in self.blocks.values():
                if isinstance(state, RecurrentState):
                    state.keep_path(start, rows)
            self.slots.keep_path(len(rows))

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """As `Backend.copy_pages`."""
        for state in self.blocks.values():
            state.copy_pages(sources, targets)
        if self.recent is not None:
            self.recent.copy_pages(sources, targets)

    def read_pages(self, pages: Sequence[int]) -> list[PageParts]:
        """As `Backend.read_pages`; a page is one part."""
        held = self._pages()
        nbytes = sum(array[:, :1].nbytes for array in held)
        contents = [[np.empty(nbytes, np.uint8)] for _ in pages]
        for page, (part,) in zip(pages, contents, strict=True):
            for array, copy in _split(part, held):
                copy[...] = array[:, page]
        return contents

    def write_pages(self, pages: Sequence[int], contents: Sequence[PageParts]) -> None:
        """As `Backend.write_pages`."""
        held = self._pages()
        for page, (part,) in zip(pages, contents, strict=True):
            for array, copy in _split(part, held):
                array[:, page] = copy
        if self.recent is not None:
            self.recent.drop(pages)

    def _pages(self) -> list[npt.NDArray[np.uint8]]:
        """Views (heads, pages, bytes) of the arrays of all blocks."""
        held = [array for state in self.blocks.values() for array in state.pages()]
        return [array.reshape(*array.shape[:2], -1).view(np.uint8) for array in held]

    def evict(self, positions: npt.NDArray[np.int64], end: int) -> None:
        """As `Backend.evict`."""
        check_evicted(positions, end)
        for state in self.blocks.values():
            state.evict(positions, end)
        if self.recent is not None:
            self.recent.drop()


def _split(
    part: npt.NDArray[np.uint8], arrays: Iterable[npt.NDArray[np.uint8]]
) -> Iterator[tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]]:
    """Each of the arrays (heads, pages, bytes), and what a page has of it, as a view (heads, bytes) of its
    bytes.
    """
    end = 0
    for array in arrays:
        heads, _, nbytes = array.shape
        begin, end = end, end + heads * nbytes
        yield array, part[begin:end].reshape(heads, nbytes)


def _caches(states: Iterable[BlockState]) -> list[RecentCache]:
    """The caches of the blocks that have recent positions."""
    return [state.cache for state in states if isinstance(state, CacheState)]


@dataclass(frozen=True)
class StatePool:
    """The states of several sequences in common arrays, so that a step can take a token of each.

    `joined`: the arrays as one state, without slots. A cache there has the positions of all states, one
    state after the other; a recurrent state their rows and slots.
    """

    states: Sequence[DecoderState]
    joined: DecoderState

    def page_table(self, index: BlockIndex) -> tuple[int, int] | None:
        """(pages of a state, pages of its ring) of the cache that a block reads; None: it reads none."""
        cache = getattr(self.states[0].get(index), "cache", None)
        return None if cache is None else (cache.positions // LANES, cache.ring // LANES)


def snapshot_slots(slots: StateSlots | None) -> tuple[list[int], list[npt.NDArray[np.int64]]]:
    """The slots that are part of a snapshot, and the array that describes them, if any state is recurrent."""
    return ([], []) if slots is None else (slots.stored(), [slots.description()])


def restored_slots(slots: StateSlots | None, arrays: Sequence[npt.NDArray[np.generic]]) -> slice:
    """The slots to which those of a snapshot are copied. Raises `ValueError`: it is of another cache."""
    if slots is None:
        return slice(0)
    if not arrays or arrays[0].dtype != np.int64:
        raise ValueError("the snapshot is of another cache")
    return slots.restore(arrays[0])


NO_EXPERTS = -1


@dataclass(frozen=True)
class Routing:
    """Buffer that a backend fills with routing results if it is passed at load time; this has no extra cost.

    `ids` (layers, tokens, experts_per_token) int64: the experts of the last step's tokens, highest score
    first; NO_EXPERTS in layers without experts. Rows beyond the step's tokens hold data of older steps.
    """

    ids: npt.NDArray[np.int64]

    @classmethod
    def allocate(cls, spec: DecoderSpec, batch: int) -> "Routing":
        """A buffer for steps of at most `batch` tokens."""
        experts_per_token = max((block.experts_per_token for block in spec.specs(MoeSpec)), default=0)
        return cls(np.full((len(spec.layers), batch, experts_per_token), NO_EXPERTS, np.int64))
