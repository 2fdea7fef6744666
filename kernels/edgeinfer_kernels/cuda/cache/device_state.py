"""The base of backends whose state is on a device."""

from abc import abstractmethod
from collections.abc import Sequence
from copy import copy
from typing import Self

import numpy as np
import numpy.typing as npt
import torch

from edgeinfer_kernels.backend import Backend, BackendError, StateArrays
from edgeinfer_kernels.cuda.cache.device_caches import DeviceCaches
from edgeinfer_kernels.cuda.cache.sequences import DeviceSequence, DeviceSequences
from edgeinfer_kernels.cuda.current_device import on_device, on_open_device
from edgeinfer_kernels.cuda.decode.device_logits import DeviceRows
from edgeinfer_kernels.cuda.device_parts import synchronize
from edgeinfer_kernels.decoder_state import DecoderState, PageParts, StatePool, check_evicted


class DeviceStateBackend(Backend[DeviceRows]):
    """A backend whose caches are on a device; its sequence is one of those that the `pool` has.

    Steps that were started ahead are discarded before a cache changes.
    """

    device: torch.device
    _closed: bool
    _sequences: DeviceSequences
    _sequence: DeviceSequence
    _caches: DeviceCaches
    _others: "list[DeviceStateBackend]"
    """Backends of the same weights and buffers, for other sequences."""

    @abstractmethod
    def discard_ahead(self) -> None:
        """Discard steps that were started ahead: the cache is about to change."""

    @abstractmethod
    def drop(self) -> None:
        """Drop what refers to the device memory; no step is run any more."""

    def check_open(self) -> None:
        """Raises `BackendError`: the backend has been closed."""
        if self._closed:
            raise BackendError("the model has been closed; load it again")

    @property
    def pool(self) -> StatePool:
        """The states of all sequences; the first is this backend's."""
        return self._sequences.pool

    def with_state(self, state: DecoderState) -> Self:
        """As `Backend.with_state`, for a state of the `pool`."""
        other = copy(self)
        other._sequence = self._sequences.each[self._sequences.number_of(state)]
        other._caches = self._caches.of_sequence(other._sequence)
        self._others.append(other)
        return other

    def joined(self, pool: StatePool) -> Self:
        """As `Backend.joined`, for the `pool`."""
        return self.with_state(pool.states[0])

    @property
    def state_nbytes(self) -> int:
        return self._caches.nbytes

    def is_at(self, position: int) -> bool:
        """As `Backend.is_at`. A step of this position that was started ahead is dropped: its state is in
        another slot.
        """
        slots = self._caches.slots
        if slots is not None and slots.end == position + 1:
            self.discard_ahead()
            slots.rewind(position)
        return slots is None or slots.is_next(position)

    @on_open_device
    def copy_positions(self, source: int, target: int, count: int) -> None:
        self._caches.copy(source, target, count)

    @on_open_device
    def copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        self.discard_ahead()
        self._caches.copy_pages(sources, targets)

    @on_open_device
    def read_pages(self, pages: Sequence[int]) -> list[PageParts]:
        return self._caches.read_pages(pages)

    @on_open_device
    def write_pages(self, pages: Sequence[int], contents: Sequence[PageParts]) -> None:
        self.discard_ahead()
        self._caches.write_pages(pages, contents)

    @on_open_device
    def snapshot(self, end: int) -> StateArrays:
        """Copies of the keys and values of the first `end` positions, layer by layer."""
        return self._caches.copies(end)

    @on_open_device
    def restore(self, arrays: Sequence[npt.NDArray[np.generic]], end: int) -> None:
        self.discard_ahead()
        self._caches.put(arrays, end)
        synchronize(self.device)

    @on_open_device
    def checkpoint(self) -> None:
        if self._caches.slots is not None:
            self._caches.slots.checkpoint()

    def rewind(self, length: int) -> int:
        """As `Backend.rewind`; a step that was started ahead is discarded too."""
        self.check_open()
        if self._caches.slots is None:
            return length
        with on_device(self.device):
            self.discard_ahead()
            return self._caches.slots.rewind(length)

    def reach(self, length: int) -> int:
        self.check_open()
        return length if self._caches.slots is None else self._caches.slots.reach(length)

    @on_open_device
    def evict(self, positions: npt.NDArray[np.int64], end: int) -> None:
        """As `Backend.evict`; a step that was started ahead is discarded too."""
        check_evicted(positions, end)
        self.discard_ahead()
        self._caches.evict(positions, end)
        synchronize(self.device)
