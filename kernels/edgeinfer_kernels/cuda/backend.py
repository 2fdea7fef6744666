"""The Triton backend: decode steps as captured graphs, prompts in chunks, choices on the device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edgeinfer_kernels.cuda.decode_step import (
    CACHED_AT,
    MOST_TOKENS,
    ROWS,
    STATE_WORDS,
    DecodeStep,
    Tuning,
    Workspace,
)
from edgeinfer_kernels.cuda.device_memory import Arena, Uploader
from edgeinfer_kernels.cuda.device_model import DeviceModel, OnPlaced
from edgeinfer_kernels.cuda.prefill import Prefill
from edgeinfer_kernels.cuda.row_kernels import choose_best_kernel
from edgeinfer_kernels.specification import DecoderSpecification
from edgeinfer_kernels.weights import DecoderWeights

CHUNK = 512
"""Tokens of a prompt that are read in one step."""
RING = 64
"""Choices that may lie between the device and its reader."""
DEPENDENT_LAUNCH_FROM = 90
"""The compute capability from which a kernel may start before the one ahead of it has ended."""


@dataclass(frozen=True)
class DeviceRows:
    """Rows of the residual stream above the last layer, on the device; `logits` finds them there."""

    first: int
    count: int
    in_step: bool
    """They are of a decode step, whose logits are computed already."""

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, part: slice) -> "DeviceRows":
        start, stop, _ = part.indices(self.count)
        return DeviceRows(self.first + start, stop - start, self.in_step)


class CudaBackend:
    """A decoder on one CUDA device, with its caches. All memory is taken when it is made.

    On a device without CUDA (the tests' CPU) the same kernels are launched one by one.

    Raises:
        UnsupportedOnDeviceError: a matrix without a kernel.
        DeviceMemoryError: the device has less memory than `device_bytes` says.
    """

    name = "cuda"

    def __init__(
        self,
        specification: DecoderSpecification,
        weights: DecoderWeights,
        context: int,
        device: torch.device,
        *,
        quantised_cache: bool = False,
        chunk: int = CHUNK,
        tuning: Tuning | None = None,
        on_placed: OnPlaced | None = None,
    ) -> None:
        self.specification = specification
        self.device = device
        self.batch = chunk
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._cuda = device.type == "cuda"
        capability = compute_capability(device)
        options: dict[str, Any] = {"quantised_cache": quantised_cache, "chunk": chunk}
        self._arena = Arena(device, device_bytes(specification, weights, context, device, **options))
        try:
            self._parts = _build(specification, weights, context, self._arena, capability, **options)
            uploader = Uploader(device)
            try:
                self._parts.model.fill(uploader, on_placed)
            finally:
                uploader.close()
        except BaseException:
            self.close()
            raise
        dependent = self._cuda and capability >= DEPENDENT_LAUNCH_FROM
        self.step = DecodeStep(
            self._parts.model, self._parts.workspace, tuning or Tuning(), dependent=dependent
        )
        self._state = self._host(STATE_WORDS, torch.int32)
        self._ids = self._host(chunk, torch.int32)
        self._chosen = self._host(RING, torch.int32)
        self._host_logits = self._host(MOST_TOKENS * specification.vocabulary_size, torch.float32)
        self._ahead: tuple[int, int] | None = None
        self._events = [torch.cuda.Event() for _ in range(2)] if self._cuda else []
        self._pending: tuple[int, ...] = ()

    def _host(self, size: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(size, dtype=dtype, pin_memory=self._cuda)

    @property
    def nbytes(self) -> int:
        """Bytes that were taken on the device."""
        return self._arena.used

    def embed(self, ids: Sequence[int]) -> DeviceRows:
        if len(ids) > self.batch:
            raise ValueError(f"{len(ids)} tokens in one step; the backend was loaded for {self.batch}")
        self._pending = tuple(ids)
        self._ahead = None
        return DeviceRows(0, len(ids), len(ids) <= MOST_TOKENS)

    def all_layers(self, x: DeviceRows, start: int) -> None:
        """Read the ids that `embed` was given, at positions start…; their rows are then above the last layer."""
        ids = self._pending
        if x.in_step:
            self._set_state(ids, start)
            self._run_step(len(ids))
            return
        self._ids[: len(ids)] = torch.tensor(ids, dtype=torch.int32)
        prefill = self._parts.prefill
        prefill.ids[: len(ids)].copy_(self._ids[: len(ids)], non_blocking=True)
        prefill.read(len(ids), start)
        self._synchronise()

    def _set_state(self, ids: Sequence[int], start: int) -> None:
        """A chain of tokens: each sees itself and those before."""
        count = len(ids)
        state = self._state.numpy()
        state[:count] = ids
        state[8 : 8 + count] = np.arange(start, start + count)
        state[16 : 16 + count] = (2 << np.arange(count)) - 1
        state[CACHED_AT] = start
        self._parts.workspace.state.copy_(self._state, non_blocking=True)

    def _run_step(self, tokens: int, choosing: bool = False) -> None:
        if not self._cuda:
            self._launch(tokens, choosing)
            return
        graph = self._graphs.get((tokens, choosing)) or self._capture(tokens, choosing)
        graph.replay()

    def _launch(self, tokens: int, choosing: bool) -> None:
        self.step.launch(tokens)
        if choosing:
            space = self._parts.workspace
            dependent = self.step.dependent
            options: dict[str, Any] = {"launch_pdl": True} if dependent else {}
            choose_best_kernel[(1,)](
                space.best,
                space.best_ids,
                space.state,
                self._chosen,
                PROGRAMS=self._parts.model.head.shapes.padded_rows // ROWS,
                RING=RING,
                DEPENDENT=dependent,
                num_warps=8,
                **options,
            )

    def _capture(self, tokens: int, choosing: bool) -> torch.cuda.CUDAGraph:
        """Compile and record a step. What the warm-up writes lies behind the cached tokens."""
        state = self._parts.workspace.state.clone()
        self._launch(tokens, choosing)
        torch.cuda.synchronize(self.device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._launch(tokens, choosing)
        self._parts.workspace.state.copy_(state)
        self._graphs[tokens, choosing] = graph
        return graph

    def choose_best(self, token_id: int, start: int, room: bool) -> int:
        """Read one token at `start` and return the id of the highest logit behind it.

        While the caller looks at it, the device goes on with that id (if there is `room` for it): calling
        again with it at start + 1 finds the step under way. Logits of such steps stay on the device.
        """
        if self._ahead != (token_id, start):
            self._set_state([token_id], start)
            self._choosing_step(start)
        if room:
            self._choosing_step(start + 1)
        if self._cuda:
            self._events[start % 2].synchronize()
        chosen = int(self._chosen[start % RING])
        self._ahead = (chosen, start + 1) if room else None
        return chosen

    def _choosing_step(self, start: int) -> None:
        self._run_step(1, choosing=True)
        if self._cuda:
            self._events[start % 2].record()

    def logits(self, x: DeviceRows) -> npt.NDArray[np.float32]:
        space, size = self._parts.workspace, self.specification.vocabulary_size
        out = np.empty((len(x), size), np.float32)
        for first in range(0, len(x), MOST_TOKENS):
            count = min(MOST_TOKENS, len(x) - first)
            at = x.first + first
            if not x.in_step:
                space.x[:count].copy_(self._parts.prefill.x[at : at + count])
                self.step.head_of(count)
                at = 0
            kept = self._host_logits[: count * size].view(count, size)
            kept.copy_(space.logits[at : at + count], non_blocking=True)
            self._synchronise()
            out[first : first + count] = kept.numpy()
        return out

    def _synchronise(self) -> None:
        if self._cuda:
            torch.cuda.current_stream(self.device).synchronize()

    def close(self) -> None:
        """Give the device's memory back."""
        self._graphs.clear()
        self._ahead = None
        if hasattr(self, "_parts"):
            del self._parts
        if hasattr(self, "step"):
            del self.step
        self._arena.close()


@dataclass(frozen=True)
class _Parts:
    model: DeviceModel
    workspace: Workspace
    prefill: Prefill


def _build(
    specification: DecoderSpecification,
    weights: DecoderWeights,
    context: int,
    arena: Arena,
    capability: int,
    *,
    quantised_cache: bool,
    chunk: int,
) -> _Parts:
    model = DeviceModel(specification, weights, arena, context, quantised_cache=quantised_cache)
    return _Parts(model, Workspace(model, arena), Prefill(model, arena, chunk, capability))


def compute_capability(device: torch.device) -> int:
    """As 90; 0 for a device that isn't CUDA's."""
    if device.type != "cuda":
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def device_bytes(
    specification: DecoderSpecification,
    weights: DecoderWeights,
    context: int,
    device: torch.device,
    *,
    quantised_cache: bool = False,
    chunk: int = CHUNK,
) -> int:
    """Bytes that the backend will take on the device for weights, caches and buffers.

    Raises:
        UnsupportedOnDeviceError: a matrix without a kernel.
    """
    counting = Arena()
    _build(
        specification,
        weights,
        context,
        counting,
        compute_capability(device),
        quantised_cache=quantised_cache,
        chunk=chunk,
    )
    return counting.used
