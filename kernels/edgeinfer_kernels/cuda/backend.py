"""The Triton backend: decode steps as captured graphs, prompts in chunks, choices on the device."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edgeinfer_kernels.backend import BackendError
from edgeinfer_kernels.cuda.decode_step import (
    CACHED_AT,
    MOST_TOKENS,
    ROWS,
    STATE_WORDS,
    DecodeStep,
    Tuning,
    Workspace,
)
from edgeinfer_kernels.cuda.device_memory import Arena, DeviceMemoryError, Uploader
from edgeinfer_kernels.cuda.device_model import DeviceModel, OnPlaced, Part
from edgeinfer_kernels.cuda.device_sizes import CHUNK, KEPT, RECENT, REQUEST_SIZE, SLICE
from edgeinfer_kernels.cuda.prefill import Prefill
from edgeinfer_kernels.cuda.row_kernels import advance_kernel, choose_best_kernel
from edgeinfer_kernels.cuda.sampling import DrawSettings, SamplingBuffers, sample
from edgeinfer_kernels.cuda.step_timer import StepTimer
from edgeinfer_kernels.cuda.tuner import (
    RejectedTrialError,
    remember_tuning,
    remembered_tuning,
    tune,
    tuning_key,
)
from edgeinfer_kernels.specification import DecoderSpecification
from edgeinfer_kernels.weights import DecoderWeights

RING = 64
"""Choices that may lie between the device and its reader."""
_NONE, _BEST, _DRAW = "none", "best", "draw"
DEPENDENT_LAUNCH_FROM = 90
"""The compute capability from which a kernel may start before the one ahead of it has ended."""


class KernelsUnavailableError(RuntimeError):
    """Triton can't compile here; the text says what it misses."""


@contextmanager
def _device_errors() -> Iterator[None]:
    """Failures of the device and of the compiler as errors that a person can read."""
    try:
        yield
    except (BackendError, DeviceMemoryError, ValueError):
        raise
    except RuntimeError as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        if "C compiler" in str(error):
            raise KernelsUnavailableError(
                "Triton needs a C compiler to start kernels: install gcc or clang, or name one in CC"
            ) from error
        raise BackendError(f"the GPU failed ({lines[0]}); load the model again") from error


class SampledSettings(Protocol):
    """The sampler settings that the device can follow."""

    @property
    def temperature(self) -> float: ...
    @property
    def top_k(self) -> int: ...
    @property
    def top_p(self) -> float: ...
    @property
    def min_p(self) -> float: ...
    @property
    def repeat_penalty(self) -> float: ...
    @property
    def frequency_penalty(self) -> float: ...
    @property
    def presence_penalty(self) -> float: ...


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
        DeviceMemoryError: the device has less memory than `device_parts` says.
    """

    name = "cuda"
    most_recent = RECENT

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
        self._weights, self._quantised = weights, quantised_cache
        self.device = device
        self.batch = chunk
        self._graphs: dict[tuple[int, str], torch.cuda.CUDAGraph] = {}
        self._cuda = device.type == "cuda"
        self._closed = False
        capability = compute_capability(device)
        options: dict[str, Any] = {"quantised_cache": quantised_cache, "chunk": chunk}
        parts = device_parts(specification, weights, context, device, **options)
        self._arena = Arena(device, sum(part.nbytes for part in parts))
        try:
            self._parts = _build(specification, weights, context, self._arena, capability, **options)
            drawing = self._parts.drawing
            self._buffers, self._requests, self._recent = drawing.buffers, drawing.requests, drawing.recent
            self._drawn, self._results = drawing.drawn, drawing.results
            uploader = Uploader(device)
            try:
                self._parts.model.fill(uploader, on_placed)
            finally:
                uploader.close()
            if self._cuda:
                torch.cuda.empty_cache()
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
        self._host_requests = self._host(RING * REQUEST_SIZE, torch.float64).view(RING, REQUEST_SIZE)
        self._host_recent = self._host(RECENT, torch.int32)
        self._host_logits = self._host(MOST_TOKENS * specification.vocabulary_size, torch.float32)
        self._ahead: tuple[int, int, bool] | None = None
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
        """Read the ids that `embed` was given, at positions start…, up to above the last layer."""
        with _device_errors():
            self._read(self._pending, x, start)

    def _read(self, ids: Sequence[int], x: DeviceRows, start: int) -> None:
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

    def _run_step(self, tokens: int, choice: str = _NONE) -> None:
        if not self._cuda:
            self._launch(tokens, choice)
            return
        graph = self._graphs.get((tokens, choice)) or self._capture(tokens, choice)
        graph.replay()

    def _launch(self, tokens: int, choice: str) -> None:
        self.step.launch(tokens)
        space = self._parts.workspace
        if choice == _BEST:
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
        elif choice == _DRAW:
            sample(space.logits[:1], self._requests, self._recent, self._buffers, self._drawn, self._results)
            advance_kernel[(1,)](self._results, space.state, self._chosen, RING=RING)

    def _capture(self, tokens: int, choice: str) -> torch.cuda.CUDAGraph:
        """Compile and record a step. What the warm-up writes lies behind the cached tokens."""
        state = self._parts.workspace.state.clone()
        self._launch(tokens, choice)
        torch.cuda.synchronize(self.device)
        self._parts.workspace.state.copy_(state)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self._launch(tokens, choice)
        self._graphs[tokens, choice] = graph
        return graph

    def choose(
        self,
        token_id: int,
        start: int,
        draw: Sequence[float] | None = None,
        recent: Sequence[int] = (),
        following: Sequence[float] | None = None,
        room: bool = True,
    ) -> int:
        """Read one token at `start` and choose the next on the device; -1: the host has to sample.

        `draw` None: the id of the highest logit; else a `DrawSettings.request`, with the `recent` ids that
        its penalties count, RECENT at most. While the caller looks at the id, the device goes on with it if
        there is `room` in the cache and the next draw is known (`following`): calling again with that id at
        start + 1 finds the step under way. The logits of such steps stay on the device.
        """
        with _device_errors():
            return self._choose(token_id, start, draw, recent, following, room)

    def _choose(
        self,
        token_id: int,
        start: int,
        draw: Sequence[float] | None,
        recent: Sequence[int],
        following: Sequence[float] | None,
        room: bool,
    ) -> int:
        if self._closed:
            raise BackendError("the model has been closed; load it again")
        drawing = draw is not None
        if self._ahead != (token_id, start, drawing):
            self._set_state([token_id], start)
            self._choosing_step(start, draw, recent)
        goes_on = room and not recent and (following is not None or not drawing)
        if goes_on:
            self._choosing_step(start + 1, following, ())
        if self._cuda:
            self._events[start % 2].synchronize()
        chosen = int(self._chosen[start % RING])
        self._ahead = (chosen, start + 1, drawing) if goes_on and chosen >= 0 else None
        return chosen

    def draw_request(self, settings: SampledSettings, recent: int, chance: float) -> list[float]:
        """One draw as `choose` takes it; `recent`: how many ids the penalties count."""
        draw = DrawSettings(
            temperature=settings.temperature,
            top_k=settings.top_k,
            top_p=settings.top_p,
            min_p=settings.min_p,
            repeat_penalty=settings.repeat_penalty,
            frequency_penalty=settings.frequency_penalty,
            presence_penalty=settings.presence_penalty,
        )
        return draw.request(recent, chance)

    def _choosing_step(self, start: int, draw: Sequence[float] | None, recent: Sequence[int]) -> None:
        if draw is None:
            self._run_step(1, _BEST)
        else:
            slot = start % RING
            request = self._host_requests[slot]
            request[:] = torch.tensor(draw, dtype=torch.float64)
            self._requests[0].copy_(request, non_blocking=True)
            if recent:
                self._host_recent[: len(recent)] = torch.tensor(recent, dtype=torch.int32)
                self._recent[0].copy_(self._host_recent, non_blocking=True)
            self._run_step(1, _DRAW)
        if self._cuda:
            self._events[start % 2].record()

    def logits(self, x: DeviceRows) -> npt.NDArray[np.float32]:
        out = np.empty((len(x), self.specification.vocabulary_size), np.float32)
        with _device_errors():
            self._fetch_logits(x, out)
        return out

    def _fetch_logits(self, x: DeviceRows, out: npt.NDArray[np.float32]) -> None:
        space, size = self._parts.workspace, out.shape[1]
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

    def tune(self, folder: Path, seconds: float) -> None:
        """Cut the step's kernels as suits this GPU and model: as remembered in `folder`, or measured now."""
        key = tuning_key(
            torch.cuda.get_device_name(self.device), self.specification, self._weights, self._quantised
        )
        tuning = remembered_tuning(folder, key)
        if tuning is None:
            try:
                with _device_errors():
                    tuning = tune(StepTimer(self.step), self.step.tuning, seconds).tuning
            except RejectedTrialError:  # not even the usual cuts can be timed here: they stay as they are
                return
            self._graphs.clear()
            remember_tuning(folder, key, tuning)
        self.step.tuning = tuning

    def warm_up(self) -> None:
        """Compile and record the steps of one token, so that no answer waits for that.

        Raises:
            KernelsUnavailableError: there is no compiler here for Triton.
        """
        with _device_errors():
            for choice in (_NONE, _BEST, _DRAW):
                if self._cuda and (1, choice) not in self._graphs:
                    self._set_state([0], 0)
                    self._capture(1, choice)

    def _synchronise(self) -> None:
        if self._cuda:
            torch.cuda.current_stream(self.device).synchronize()

    def close(self) -> None:
        """Give the device's memory back."""
        self._closed = True
        self._graphs.clear()
        self._ahead = None
        for name in ("_parts", "step", "_buffers", "_requests", "_recent", "_drawn", "_results"):
            self.__dict__.pop(name, None)
        self._arena.close()


class _Drawing:
    """What drawing a token on the device takes."""

    def __init__(self, vocabulary: int, arena: Arena) -> None:
        slices = -(-vocabulary // SLICE)
        self.buffers = SamplingBuffers(
            arena.take((1, slices, KEPT), torch.int64),
            arena.take((1, slices), torch.float32),
            arena.take((1, slices), torch.float32),
            arena.take((1, slices), torch.int32),
            KEPT,
            SLICE,
        )
        self.requests = arena.take((1, REQUEST_SIZE), torch.float64)
        self.recent = arena.take((1, RECENT), torch.int32)
        self.drawn = arena.take((1,), torch.int32)
        self.results = arena.take((1, 2), torch.int32)


@dataclass(frozen=True)
class _Parts:
    model: DeviceModel
    workspace: Workspace
    prefill: Prefill
    drawing: _Drawing


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
    return _Parts(
        model,
        Workspace(model, arena),
        Prefill(model, arena, chunk, capability),
        _Drawing(specification.vocabulary_size, arena),
    )


def compute_capability(device: torch.device) -> int:
    """As 90; 0 for a device that isn't CUDA's."""
    if device.type != "cuda":
        return 0
    major, minor = (int(part) for part in torch.cuda.get_device_capability(device))
    return 10 * major + minor


def cuda_device(index: int) -> torch.device:
    """The device of that number."""
    return torch.device("cuda", index)


def free_bytes(index: int) -> int:
    """Bytes that the GPU could give now. Takes a context, if this process has none yet."""
    free, _ = torch.cuda.mem_get_info(index)
    return int(free)


def device_parts(
    specification: DecoderSpecification,
    weights: DecoderWeights,
    context: int,
    device: torch.device,
    *,
    quantised_cache: bool = False,
    chunk: int = CHUNK,
) -> list[Part]:
    """What the backend will take on the device, to the byte.

    Raises:
        UnsupportedOnDeviceError: a matrix without a kernel.
    """
    counting = Arena()
    options: dict[str, Any] = {"quantised_cache": quantised_cache, "chunk": chunk}
    capability = compute_capability(device)
    model = _build(specification, weights, context, counting, capability, **options).model
    held = sum(part.nbytes for part in model.parts)
    return [*model.parts, Part("workspace", counting.used - held, read=False)]
