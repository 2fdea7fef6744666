"""Compiles the kernels of decode steps, several at a time, before a step is wanted."""

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from threading import Event
from typing import Any

import triton

from edgeinfer_kernels.cuda.decode.decode_step import DecodeStep
from edgeinfer_kernels.cuda.decode.step_launches import StepLaunches

OnCompiled = Callable[[int, int], None]
"""Hears of (kernels that are compiled, kernels in all)."""
COMPILERS: int | None = None
"""Threads; None: some more than there are processors."""
AGAIN = 5
"""How often what failed is tried once more: the first Pythons 3.11 can fail to parse in several threads at
once (SystemError).
"""
PATIENCE = 0.5
"""Seconds before anybody hears of it: kernels that were compiled before come from the disk in less."""


class _Compilations(StepLaunches):
    """Compile kernels that others launch."""

    def launch(
        self, kernel: Any, grid: tuple[int, ...], *arguments: Any, warps: int, **constants: Any
    ) -> Any:
        return kernel.warmup(*arguments, grid=grid, **self.options(warps), **constants)


class _Compilers(ThreadPoolExecutor):
    """Threads that can be told to begin nothing more; the compiler lets others run beside it."""

    def __init__(self) -> None:
        super().__init__(COMPILERS, thread_name_prefix="compiler")
        self.stopped = Event()

    def submit(self, compilation: Callable[[], Any]) -> Future[Any]:  # type: ignore[override]
        return super().submit(self._unless_stopped, compilation)

    @contextmanager
    def stopped_by_errors(self) -> Iterator[None]:
        """What is raised within, Ctrl-C too, waits for nothing but what has begun."""
        try:
            yield
        except BaseException:
            self.stopped.set()
            raise

    def _unless_stopped(self, compilation: Callable[[], Any]) -> Any:
        if self.stopped.is_set():
            raise InterruptedError
        for _ in range(AGAIN):
            with suppress(Exception):
                return compilation()
        return compilation()


def compile_steps(step: DecodeStep, widths: Iterable[int], on_compiled: OnCompiled | None = None) -> None:
    """Compile what steps of these numbers of tokens launch, on all processors.

    What can't be compiled is passed over here: launching it says why.
    """
    usual = step.launches
    launches = _Compilations(usual.model, usual.workspace, usual.tuning, dependent=usual.dependent)
    rehearsal, begin = DecodeStep(launches, step.turns), time.perf_counter()
    compilers = _Compilers()
    compiling = triton.AsyncCompileMode(compilers, ignore_errors=True)
    with compilers, compiling, compilers.stopped_by_errors():
        for width in widths:
            rehearsal.launch(width)
        kernels = compiling.raw_futures
        for done, _ in enumerate(as_completed(kernels), 1):
            if on_compiled is not None and time.perf_counter() - begin > PATIENCE:
                on_compiled(done, len(kernels))
