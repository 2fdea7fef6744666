"""The current device of a thread: the one place that decides where kernels run and memory is allocated.

CUDA's current device belongs to a thread, and begins as device 0. Triton launches kernels there, torch
captures graphs, makes streams and pins memory there. So all work of a device runs within `current` or
`on_device`.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache, wraps
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

import torch

from edgeinfer_kernels.backend import BackendError
from edgeinfer_kernels.cuda.device_memory import DeviceMemoryError, KernelsUnavailableError
from edgeinfer_kernels.cuda.driver import create_context

READABLE = (BackendError, DeviceMemoryError, KernelsUnavailableError)
P = ParamSpec("P")
R = TypeVar("R")


class HasDevice(Protocol):
    """What works on one device until it is closed."""

    @property
    def device(self) -> torch.device:
        """Where its memory is."""

    def check_open(self) -> None:
        """Raises `BackendError`: it has been closed."""


S = TypeVar("S", bound=HasDevice)


def current(device: torch.device) -> AbstractContextManager[Any]:
    """In this context, `device` is the current one of this thread. Only CUDA has such a state."""
    if device.type != "cuda":
        return nullcontext()
    _create_context(device.index)
    context: AbstractContextManager[Any] = torch.cuda.device(device.index)  # an index is found faster
    return context


@cache
def _create_context(index: int) -> None:
    create_context(index)


class on_device:  # noqa: N801
    """As `current`; failures of the device and of the compiler become readable errors. A class: a context
    manager of a generator would take longer than most methods that run in it.
    """

    def __init__(self, device: torch.device) -> None:
        self._current = current(device)

    def __enter__(self) -> None:
        self._current.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._current.__exit__(kind, error, trace)
        if not isinstance(error, RuntimeError) or isinstance(error, READABLE):
            return
        lines = str(error).strip().splitlines() or [type(error).__name__]
        if "C compiler" in str(error):
            raise KernelsUnavailableError(
                "Triton needs a C compiler to start kernels: install gcc or clang, or name one in CC"
            ) from error
        raise BackendError(f"the GPU failed ({lines[0]}); load the model again") from error


def on_open_device(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """A method that runs on its object's device, as `on_device`, and only until the object is closed."""

    @wraps(method)
    def run(own: S, /, *arguments: P.args, **keywords: P.kwargs) -> R:
        own.check_open()
        with on_device(own.device):
            return method(own, *arguments, **keywords)

    return run


def capturing(
    device: torch.device, graph: torch.cuda.CUDAGraph, pool: Any = None
) -> AbstractContextManager[Any]:
    """Capture what is launched in this context, on the capture stream of the device.

    torch's default stream for captures is of the device that was current at the first capture of the process.
    """
    # Other threads may use the device at the same time, as those of NCCL do.
    context: AbstractContextManager[Any] = torch.cuda.graph(
        graph, pool=pool, stream=_capture_stream(device), capture_error_mode="thread_local"
    )
    return context


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for each device, so that captures share memory."""
    return torch.cuda.Stream(device)
