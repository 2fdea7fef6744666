"""Experts of a divided mixture change places while it decodes: hot ones come to the device, cold ones leave.

Who is to come a policy says, which hears how often tokens asked for each expert. Both that and the copy, from
the file's map into the slot of the expert that leaves, are a second thread's work on a stream of their own,
beside the steps. Between two steps the tables are changed that kernels look experts up in: the one that
leaves is the host's from before its slot is written, the one that comes is the device's once it is there.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edgeinfer_kernels.cuda.device_experts import DeviceExperts
from edgeinfer_kernels.cuda.device_sizes import REFILL_BYTES
from edgeinfer_kernels.weights import ExpertWeights, Matrix

TOKENS_A_LOOK = 8
"""Tokens between two looks at what was asked for, while nothing is under way."""


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

    def note(self, chosen: npt.NDArray[np.int64], tokens: int) -> None:
        """`chosen` (layers, experts): how often each was chosen by the last `tokens` tokens."""
        ...

    def proposal(self) -> Any:
        """The `Change` to make next; None: none."""
        ...

    def begin(self, swap: Any) -> None:
        """A change's slot is about to be written."""
        ...

    def land(self, swap: Any) -> None:
        """A change's slot holds its expert."""
        ...


class ChangingLayer(NamedTuple):
    """A layer whose experts change: its number among the device's, what lies there, all of its weights."""

    number: int
    here: DeviceExperts
    weights: ExpertWeights


class ExpertRefills:
    """Carries out what `policy` says, whose rows are the `layers`. `asked` (device's layers, experts) int32:
    how often each expert was asked for. A device that hasn't the memory to unpack an expert any more ends the
    changes, not the answer.

    On a device without CUDA (the tests' CPU) everything is done at once, in `between_steps`.
    """

    def __init__(self, layers: Sequence[ChangingLayer], asked: Tensor, policy: SlotPolicy) -> None:
        self._layers, self._asked, self._policy = layers, asked, policy
        self._cuda = asked.is_cuda
        self._stream = torch.cuda.Stream(asked.device) if self._cuda else None
        self._pool = ThreadPoolExecutor(1, "expert-refills") if self._cuda else None
        self._staged = torch.empty(REFILL_BYTES, dtype=torch.uint8, pin_memory=self._cuda)
        self._counts = torch.zeros(asked.shape, dtype=torch.int32, pin_memory=self._cuda)
        self._seen = np.zeros(asked.shape, np.int32)
        self._places = [self._copy_of(layer.here.places) for layer in layers]
        self._job: Future[Any] | None = None
        self._coming: Change | None = None
        self._tokens = self._in_step = 0
        self.changes = 0
        """Experts that have come."""
        self.ended = False

    def _copy_of(self, places: Tensor) -> Tensor:
        copy = torch.empty(places.shape, dtype=places.dtype, pin_memory=self._cuda)
        copy.copy_(places)
        return copy

    def between_steps(self, tokens: int) -> None:
        """When a step is over, before the next one, of so many tokens."""
        self._tokens += self._in_step
        self._in_step = tokens
        if self._job is None:
            if self._tokens >= TOKENS_A_LOOK and not self.ended:
                self._job = self._submit(self._look, self._tokens)
                self._tokens = 0
            return
        if not self._job.done():
            return
        job, self._job = self._job, None
        if isinstance(job.exception(), torch.OutOfMemoryError):
            self.ended = True
            return
        found = job.result()
        if self._coming is not None:
            come, self._coming = self._coming, None
            self._policy.land(come)
            self._tell(come.layer, come.expert, come.slot)
            self.changes += 1
        elif found is not None:
            self._policy.begin(found)
            self._tell(found.layer, found.leaves, -1)
            self._coming = found
            self._job = self._submit(self._fill, found)

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

    def _look(self, tokens: int) -> Change | None:
        """What the policy wants, now that it has heard of the last tokens."""
        with self._beside():
            self._counts.copy_(self._asked, non_blocking=True)
            self._wait()
        counts = self._counts.numpy()
        since = (counts - self._seen)[[layer.number for layer in self._layers]]
        self._seen[:] = counts
        self._policy.note(since.astype(np.int64), tokens)
        found: Change | None = self._policy.proposal()
        return found

    def _wait(self) -> None:
        if self._stream is not None:
            self._stream.synchronize()

    def _fill(self, change: Change) -> None:
        """The expert's matrices and biases to its slot."""
        _, here, w = self._layers[change.layer]
        stacks = (here.gate, w.ffn_gate_exps), (here.up, w.ffn_up_exps), (here.down, w.ffn_down_exps)
        biases = (
            (here.gate_bias, w.ffn_gate_exps_bias),
            (here.up_bias, w.ffn_up_exps_bias),
            (here.down_bias, w.ffn_down_exps_bias),
        )
        with self._beside():
            for target, stack in stacks:
                matrix = stack.expert(change.expert)
                for first, raw in self._chunks(matrix):
                    target.fill(change.slot * matrix.rows + first, raw)
            for (_, stack), (held, values) in zip(stacks, biases, strict=True):
                if held is not None and values is not None:
                    own = values.reshape(-1, stack.rows)[change.expert]
                    held[change.slot * stack.rows :][: stack.rows].copy_(torch.from_numpy(own))
            self._wait()

    def _chunks(self, matrix: Matrix) -> Iterator[tuple[int, Tensor]]:
        """(first row, (rows, bytes) uint8 on the device) of a matrix, all but the last of pairs of rows."""
        row_bytes = matrix.raw.shape[1]
        step = max(REFILL_BYTES // row_bytes // 2, 1) * 2
        for first in range(0, matrix.rows, step):
            rows = matrix.raw[first : first + step]
            if rows.nbytes > REFILL_BYTES:
                yield first, torch.from_numpy(np.array(rows)).to(self._asked.device)
                continue
            self._wait()
            staged = self._staged[: rows.nbytes]
            staged.numpy().reshape(rows.shape)[:] = rows
            yield first, staged.to(self._asked.device, non_blocking=True).view(rows.shape)

    def settle(self) -> None:
        """Wait for what is under way."""
        if self._job is not None:
            wait([self._job])

    def close(self) -> None:
        """End the second thread."""
        if self._pool is not None:
            self._pool.shutdown()
