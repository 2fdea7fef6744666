"""The recent rows of recurrent blocks on a device, and those of blocks on the CPU during streamed prefill."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from edgeinfer_kernels.cpu.runtime.abi import CHECKPOINT_POSITIONS, RING_ROWS
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.decoder import BlockIndex
from edgeinfer_kernels.recent_rows import RecentRows, checkpoints_for


class RowsState(Protocol):
    """The state of a block on the CPU that consists of recent rows."""

    @property
    def rows(self) -> RecentRows: ...


def take_rows(arena: Arena, positions: int, rows: int, width: int) -> RecentRows:
    """Allocate the rows of a block that reads `rows` rows before a position."""
    ring = arena.take((1, RING_ROWS, width), torch.float32)
    return RecentRows(ring, arena.take((1, checkpoints_for(positions) * rows, width), torch.float32), rows)


class HostRows:
    """Device memory for the rows of one block at a time. `shapes`: (rows, width) of each block on the CPU."""

    def __init__(self, shapes: Mapping[BlockIndex, tuple[int, int]], positions: int, arena: Arena) -> None:
        self._here = {
            shape: take_rows(arena, positions, *shape) for shape in sorted(set(shapes.values()))[-1:]
        }
        self._shapes = shapes
        self._states: Mapping[BlockIndex, Any] = {}

    def connect(self, states: Mapping[BlockIndex, RowsState]) -> None:
        """Set the states on the CPU."""
        self._states = states

    def memories(self) -> Sequence[Tensor]:
        """Nothing is pinned: the rows are small."""
        return ()

    def fetch(self, index: BlockIndex, start: int) -> RecentRows:
        """The rows of a block with those of the last positions before `start`."""
        here = self._here[self._shapes[index]]
        ring = torch.from_numpy(self._states[index].rows.ring)
        here.ring.copy_(ring[..., : here.ring.shape[2]])
        return here

    def put_back(self, index: BlockIndex, here: RecentRows, start: int, tokens: int) -> None:
        """Copy the rows of positions start…start + tokens to the CPU, after the device has computed them."""
        width, there = here.ring.shape[2], self._states[index].rows
        torch.from_numpy(there.ring)[..., :width].copy_(here.ring)
        first, last = (at // CHECKPOINT_POSITIONS * here.rows for at in (start, start + tokens))
        checkpoints = torch.from_numpy(there.checkpoints)[:, first : last + here.rows, :width]
        checkpoints.copy_(here.checkpoints[:, first : first + checkpoints.shape[1]])
