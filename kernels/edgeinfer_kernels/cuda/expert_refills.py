"""Experts of a divided mixture change places while it decodes: hot ones come to the device, cold ones leave.

Who is to come a policy says, which hears how often tokens asked for each expert: the host counts that at its
turns. Both the policy and the copy, from the host's memory into the slot of the expert that leaves, are a
second thread's work on a stream of its own, which begins when a step has been launched and this thread waits
for it anyway. Between two steps the tables are changed that kernels look experts up in: the one that leaves
is the host's from before its slot is written, the one that comes is the device's once it is there.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edgeinfer_kernels.cpu.layout import FIELDS, ROWS_A_GROUP
from edgeinfer_kernels.cpu.memory import Bytes, expert_bytes, group_bytes
from edgeinfer_kernels.cuda.device_experts import DeviceExperts
from edgeinfer_kernels.cuda.device_sizes import REFILL_BYTES
from edgeinfer_kernels.weights import ExpertWeights, Matrix

Counts = npt.NDArray[np.int64]


class Change(Protocol):
    """In `layer` (a row of the policy's), `expert` is to have the slot of `leaves`."""

    @property
    def layer(self) -> int: ...

    @property
    def expert(self) -> int: ...

    @property
    def slot(self) -> int: ...

    @property
    def leaves(self) -> int: ...


class SlotPolicy(Protocol):
    """Who says which experts are to be on the device, as `edgeinfer_offload.expert_slots.ExpertSlots`."""

    @property
    def look_after(self) -> int:
        """Tokens from one look at what was asked for to the next."""
        ...

    def note(self, chosen: Counts) -> None:
        """`chosen` (layers, experts): how often each was chosen since the last time."""
        ...

    def proposals(self) -> Sequence[Any]:
        """Each `Change` to make now, one after the other."""
        ...

    def begin(self, swap: Any) -> None:
        """A change's slot is about to be written."""
        ...

    def land(self, swap: Any) -> None:
        """A change's slot holds its expert."""
        ...


class CountingHost(Protocol):
    """The host's half, as `edgeinfer_kernels.cpu.host_half.HostHalf`."""

    @property
    def asked(self) -> Mapping[int, Counts]:
        """How often each expert was asked for, by layer."""
        ...

    def memory_of(self, matrix: Matrix) -> Bytes:
        """Where a matrix lies in the kernels' layout."""
        ...


class ChangingLayer(NamedTuple):
    """What of a layer lies on the device, all of its weights, which are the host's too; the matrices gate, up
    and down in the host's memory, and how often each expert was asked for.
    """

    here: DeviceExperts
    weights: ExpertWeights
    memories: tuple[Tensor, Tensor, Tensor]
    asked: Counts

    @classmethod
    def of(
        cls, here: DeviceExperts, weights: ExpertWeights, asked: Counts, host: CountingHost
    ) -> "ChangingLayer":
        """`weights` as the host has them."""
        gate, up, down = (
            torch.from_numpy(host.memory_of(stack))
            for stack in (weights.ffn_gate_exps, weights.ffn_up_exps, weights.ffn_down_exps)
        )
        return cls(here, weights, (gate, up, down), asked)


class ExpertRefills:
    """Carries out what `policy` says, whose rows are the `layers`. A device that hasn't the memory to unpack
    an expert any more ends the changes, not the answer.

    On a device without CUDA (the tests' CPU) everything is done at once, in `beside_step`.
    """

    def __init__(self, layers: Sequence[ChangingLayer], policy: SlotPolicy, device: torch.device) -> None:
        self._layers, self._policy, self._device = layers, policy, device
        self._cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._cuda else None
        self._pool = ThreadPoolExecutor(1, "expert-refills") if self._cuda else None
        self._seen = np.array([layer.asked for layer in layers])
        self._places = [self._copy_of(layer.here.places) for layer in layers]
        self._job: Future[Any] | None = None
        self._coming: Change | None = None
        self._wanted: list[Change] = []
        self._tokens = 0
        self.changes = 0
        """Experts that have come."""
        self.ended = False

    def _copy_of(self, places: Tensor) -> Tensor:
        copy = torch.empty(places.shape, dtype=places.dtype, pin_memory=self._cuda)
        copy.copy_(places)
        return copy

    def before_step(self, tokens: int) -> None:
        """When a step is over, before the next one, of so many tokens: from now on who has come is here."""
        self._tokens += tokens
        if self._job is not None:
            if not self._job.done():
                return
            self._finish(self._job)
            self._job = None
        if self._wanted and not self.ended:
            self._coming = self._wanted.pop(0)
            self._policy.begin(self._coming)
            self._tell(self._coming.layer, self._coming.leaves, -1)

    def _finish(self, job: "Future[Any]") -> None:
        if isinstance(job.exception(), torch.OutOfMemoryError):
            self.ended = True
            return
        found = job.result()
        if self._coming is None:
            self._wanted = list(found)
            return
        come, self._coming = self._coming, None
        self._policy.land(come)
        self._tell(come.layer, come.expert, come.slot)
        self.changes += 1

    def beside_step(self) -> None:
        """When a step has been launched: begin what goes on beside it."""
        if self._job is not None or self.ended:
            return
        if self._coming is not None:
            self._job = self._submit(self._fill, self._coming)
        elif self._tokens >= self._policy.look_after:
            self._tokens = 0
            self._job = self._submit(self._look)

    def _tell(self, row: int, expert: int, slot: int) -> None:
        """From the next step on the expert is in that slot of the device, -1: it is the host's."""
        places = self._places[row]
        places[0, expert], places[1, expert] = slot, -1 if slot >= 0 else expert
        self._layers[row].here.places.copy_(places, non_blocking=True)

    def _submit(self, work: Callable[..., Any], *arguments: Any) -> "Future[Any]":
        if self._pool is not None:
            return self._pool.submit(work, *arguments)
        done: Future[Any] = Future()
        try:
            done.set_result(work(*arguments))
        except torch.OutOfMemoryError as error:
            done.set_exception(error)
        return done

    def _beside(self) -> AbstractContextManager[Any]:
        """Work for the device that its steps needn't wait for."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _look(self) -> Sequence[Change]:
        """What the policy wants, now that it has heard of the last tokens."""
        asked = np.array([layer.asked for layer in self._layers])
        self._policy.note(asked - self._seen)
        self._seen = asked
        return self._policy.proposals()

    def _fill(self, change: Change) -> None:
        """The expert's matrices and biases to its slot."""
        here, w, memories, _ = self._layers[change.layer]
        stacks = (here.gate, w.ffn_gate_exps), (here.up, w.ffn_up_exps), (here.down, w.ffn_down_exps)
        biases = (
            (here.gate_bias, w.ffn_gate_exps_bias),
            (here.up_bias, w.ffn_up_exps_bias),
            (here.down_bias, w.ffn_down_exps_bias),
        )
        with self._beside():
            for (target, stack), memory in zip(stacks, memories, strict=True):
                for first, raw in self._chunks(stack, memory, change.expert):
                    target.fill(change.slot * stack.rows + first, raw)
            for (_, stack), (held, values) in zip(stacks, biases, strict=True):
                if held is not None and values is not None:
                    own = values.reshape(-1, stack.rows)[change.expert]
                    held[change.slot * stack.rows :][: stack.rows].copy_(torch.from_numpy(own))
            if self._stream is not None:
                self._stream.synchronize()

    def _chunks(self, stack: Matrix, memory: Tensor, expert: int) -> Iterator[tuple[int, Tensor]]:
        """(first row, (rows, bytes) uint8 on the device, as in the file) of an expert's matrix."""
        group = group_bytes(stack)
        groups = memory[: stack.experts * expert_bytes(stack)].view(stack.experts, -1, group)[expert]
        step = max(REFILL_BYTES // group, 1)
        for first in range(0, len(groups), step):
            raw = groups[first : first + step].to(self._device, non_blocking=True)
            yield first * ROWS_A_GROUP, rows_of_groups(raw, stack.format)

    def settle(self) -> None:
        """Wait for what is under way."""
        if self._job is not None:
            wait([self._job])

    def close(self) -> None:
        """End the second thread."""
        if self._pool is not None:
            self._pool.shutdown()


def rows_of_groups(groups: Tensor, format_name: str) -> Tensor:
    """(groups, bytes) uint8 of sixteen rows each in the host's layout to (rows, bytes) as in a file."""
    index = _places_of_bytes(format_name, groups.device)
    blocks = groups.view(len(groups), -1, index.numel())
    return blocks[:, :, index].transpose(1, 2).reshape(ROWS_A_GROUP * len(groups), -1)


@cache
def _places_of_bytes(format_name: str, device: torch.device) -> Tensor:
    """(16, bytes of a block): where in sixteen rows' block each row has its bytes."""
    row = np.arange(ROWS_A_GROUP)[:, None]
    fields = []
    for field in FIELDS[format_name]:
        units, byte = np.divmod(np.arange(field.unit * field.count), field.unit)
        fields.append(ROWS_A_GROUP * (field.offset + units * field.unit) + row * field.unit + byte)
    return torch.from_numpy(np.concatenate(fields, axis=1)).to(device)
