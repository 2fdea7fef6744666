"""Recurrent states on a device, and those of blocks on the CPU during streamed prefill."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from edgeinfer_kernels.blocks.common.recurrent_block import RecurrentSpec
from edgeinfer_kernels.cpu.runtime.abi import RING_ROWS
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.triton_ops.recurrent.recurrent_rows import (
    KEPT_COLUMNS,
    StateArgs,
    StateConfig,
    keep_rows_kernel,
)
from edgeinfer_kernels.decoder import BlockIndex
from edgeinfer_kernels.recurrent_state import RecurrentShape, RecurrentState, StateSlots

if TYPE_CHECKING:
    from edgeinfer_kernels.cuda.decode.decode_step import DecodeStep

FETCHED_SLOTS = 2
"""Slots of a state that was copied from the CPU: what a chunk reads, and what it writes."""


def take_recurrent(
    arena: Arena, shape: RecurrentShape, slots: int | None = None, sequences: int = 1
) -> RecurrentState:
    """Allocate the states of a block for some sequences, each with all slots or with `slots`, one after the
    other. Of several there is a slot more, for the padding of batches.
    """
    ring = arena.take((sequences * RING_ROWS, shape.row_width), torch.float32)
    count = sequences * (shape.slots if slots is None else slots) + (sequences > 1)
    return RecurrentState(shape, ring, arena.take((count, shape.slot_width), torch.float32))


def state_of(state: RecurrentState, number: int) -> RecurrentState:
    """A view of the state of one sequence."""
    rows, slots = RING_ROWS * number, state.shape.slots * number
    ring, held = state.ring[rows : rows + RING_ROWS], state.slots[slots : slots + state.shape.slots]
    return RecurrentState(state.shape, ring, held)


def state_args(state: RecurrentState) -> StateArgs:
    """The state for kernels."""
    return StateArgs(state.ring, state.slots)


def state_config(shape: RecurrentShape) -> StateConfig:
    """The layout of a state for kernels."""
    return StateConfig(shape.row_width, shape.tail_rows, shape.tail_width, shape.slot_width)


def step_config(step: "DecodeStep", shape: RecurrentShape) -> StateConfig:
    """The layout of a state for kernels of a decode step."""
    return state_config(shape)._replace(is_batch=step.is_batch, is_tree=step.is_tree)


def keep_step_rows(step: "DecodeStep", rows: Tensor, state: RecurrentState, tokens: int) -> None:
    """Launch what writes the rows of a decode step to the state."""
    shape, (own, sequences) = state.shape, step.by_sequence(tokens)
    step.launches.launch(
        keep_rows_kernel,
        (shape.tail_rows + own, -(-shape.row_width // KEPT_COLUMNS), sequences),
        rows,
        step.workspace.state,
        state_args(state),
        own,
        CONFIG=step_config(step, shape),
        BLOCK=KEPT_COLUMNS,
        warps=4,
    )


def keep_chunk_rows(rows: Tensor, words: Tensor, state: RecurrentState, tokens: int) -> None:
    """As `keep_step_rows`, for a chunk of a prompt."""
    shape, count = state.shape, min(tokens, RING_ROWS)
    keep_rows_kernel[(shape.tail_rows + count, -(-shape.row_width // KEPT_COLUMNS))](
        rows, words, state_args(state), count,
        CONFIG=state_config(shape), BLOCK=KEPT_COLUMNS, DEPENDENT=False, num_warps=4,
    )  # fmt: skip


class HostStates:
    """Device memory for the state of one block on the CPU at a time; blocks of one shape share it."""

    def __init__(self, specs: Mapping[BlockIndex, RecurrentSpec], positions: int, arena: Arena) -> None:
        self._shapes = {index: spec.recurrent for index, spec in specs.items()}
        largest = max(self._shapes.values(), key=lambda shape: shape.slot_width)
        self._here = take_recurrent(arena, largest, FETCHED_SLOTS)
        self._states: Mapping[BlockIndex, Any] = {}
        self._slots = StateSlots(0)

    def connect(self, states: Mapping[BlockIndex, Any], slots: StateSlots) -> None:
        """Set the states on the CPU."""
        self._states, self._slots = states, slots

    def memories(self) -> Sequence[Tensor]:
        """Nothing is pinned."""
        return ()

    def fetch(self, index: BlockIndex, start: int, tokens: int) -> RecurrentState:
        """The state of a block before a chunk, in slot 0; the chunk writes slot 1."""
        host_state, step = self._states[index], self._slots.begin(start, tokens)
        device_state = self._view(self._shapes[index])
        device_state.ring.copy_(torch.from_numpy(host_state.ring))
        device_state.slots[0].copy_(torch.from_numpy(host_state.slots[step.source]))
        return device_state

    def put_back(self, index: BlockIndex, device_state: RecurrentState, start: int, tokens: int) -> None:
        """Copy the state after a chunk to the CPU."""
        host_state, step = self._states[index], self._slots.begin(start, tokens)
        torch.from_numpy(host_state.ring).copy_(device_state.ring)
        torch.from_numpy(host_state.slots[step.target]).copy_(device_state.slots[1])

    def _view(self, shape: RecurrentShape) -> RecurrentState:
        """The device memory in a block's shape."""
        ring, slots = self._here.ring.view(-1), self._here.slots.view(-1)
        return RecurrentState(
            shape,
            ring[: RING_ROWS * shape.row_width].view(RING_ROWS, shape.row_width),
            slots[: FETCHED_SLOTS * shape.slot_width].view(FETCHED_SLOTS, shape.slot_width),
        )
