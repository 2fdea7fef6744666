"""The KV caches on a device: copy to and from the host, and eviction."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edgeinfer_kernels.backend import PAGE
from edgeinfer_kernels.cuda.blocks import device_module
from edgeinfer_kernels.cuda.cache.page_copies import PageCopies
from edgeinfer_kernels.cuda.cache.recurrent_states import state_of
from edgeinfer_kernels.cuda.cache.sequences import DeviceSequence
from edgeinfer_kernels.cuda.weights.device_model import DeviceModel
from edgeinfer_kernels.decoder_state import PageParts, restored_slots, snapshot_slots

Arrays = list[npt.NDArray[np.generic]]


class DeviceCaches:
    """The KV caches of a model, and its recurrent states of one sequence."""

    def __init__(self, model: DeviceModel, sequence: DeviceSequence) -> None:
        self._model = model
        self._with_state = [
            block
            for block in model.blocks
            if block.state is not None and block.residual.block.source_layer is None
        ]
        self._sequences, self._recent = model.sequences, model.recent
        self._sequence, self.slots = sequence, sequence.slots
        """The slots of recurrent states."""

    def of_sequence(self, sequence: DeviceSequence) -> "DeviceCaches":
        """The same caches, with the states of another sequence."""
        return DeviceCaches(self._model, sequence)

    def _first(self, end: int, slots: Any) -> list[Tensor]:
        first = self._sequence.first
        return [
            tensor
            for block in self._with_state
            for tensor in (
                state_of(block.state, self._sequence.number).views(end, slots)
                if block.residual.block.recurrent
                else block.state.after(first).views(end, slots)
            )
        ]

    def copies(self, end: int) -> Arrays:
        """Copies of the first `end` positions, layer by layer, as `DecoderState.snapshot`."""
        slots, description = snapshot_slots(self.slots)
        return [*description, *(tensor.cpu().numpy() for tensor in self._first(end, slots))]

    def put(self, arrays: Sequence[npt.NDArray[np.generic]], end: int) -> None:
        """Restore the arrays that `copies` returned, for `end` positions. Raises `ValueError`: from another
        cache.
        """
        tensors = self._first(end, restored_slots(self.slots, arrays))
        arrays = arrays[self.slots is not None :]
        pairs = zip(arrays, tensors, strict=False)
        given = [torch.from_numpy(np.array(array[:, : tensor.shape[1]])) for array, tensor in pairs]
        if len(arrays) != len(tensors) or [(each.shape, each.dtype) for each in given] != [
            (each.shape, each.dtype) for each in tensors
        ]:
            raise ValueError("these keys and values are of another cache")
        for tensor, array in zip(tensors, given, strict=True):
            tensor.copy_(array)
        self._drop_recent(self._sequence.pages(end).tolist())

    @property
    def have_pages(self) -> bool:
        """Whether several sequences can have pages in these caches."""
        return all(
            getattr(device_module(block.residual.block.kind), "HAS_PAGES", False) and not block.state.is_ring
            for block in self._with_state
        )

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy `count` positions; the ranges must not overlap."""
        for tensor in self._all():
            tensor[:, target : target + count] = tensor[:, source : source + count]
        if self._recent is not None:
            self._recent.copy(source, target, count)

    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy pages of PAGE positions; all sources are read before a target is written."""
        if held := self._pages():
            moves = torch.tensor([list(sources), list(targets)], pin_memory=held[0].is_cuda)
            source, target = moves.to(held[0].device, non_blocking=True)
            for pages in held:
                pages.index_copy_(1, target, pages.index_select(1, source))
        if self._recent is not None:
            self._recent.copy_pages(sources, targets)

    def read_pages(self, pages: Sequence[int]) -> list[PageParts]:
        """As `Backend.read_pages`; a page is one part."""
        return [[part] for part in self._copies.read(pages)]

    def write_pages(self, pages: Sequence[int], contents: Sequence[PageParts]) -> None:
        """As `Backend.write_pages`."""
        self._copies.write(pages, [part for (part,) in contents])
        self._drop_recent(pages)

    @cached_property
    def _copies(self) -> PageCopies:
        """Copies pages to main memory and back; it takes memory only where prefixes are spilled."""
        return PageCopies(self._pages())

    def _pages(self) -> list[Tensor]:
        """(heads, pages, PAGE, …): the tensors of all positions."""
        return [tensor.view(len(tensor), -1, PAGE, *tensor.shape[2:]) for tensor in self._all()]

    def _all(self) -> list[Tensor]:
        """The tensors of all positions."""
        return [tensor for block in self._with_state for tensor in block.state.views(block.state.positions)]

    @property
    def nbytes(self) -> int:
        """Bytes of the states of one sequence."""
        return int(sum(block.state.nbytes for block in self._with_state)) // self._sequences

    def evict(self, positions: npt.NDArray[np.int64], end: int) -> None:
        """Evict `positions` (ascending), range by range, the last first; the others up to `end` are
        compacted.
        """
        for part in reversed(np.split(positions, np.flatnonzero(np.diff(positions) > 1) + 1)):
            for block in self._with_state:
                device_module(block.residual.block.kind).shift(block, int(part[0]), len(part), end)
            end -= len(part)
        self._drop_recent()

    def _drop_recent(self, pages: Sequence[int] | None = None) -> None:
        """Pages have changed, None: all; their recent positions are filled from the cache."""
        if self._recent is not None:
            self._recent.drop(pages)
