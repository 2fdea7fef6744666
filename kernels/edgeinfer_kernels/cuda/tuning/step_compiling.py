"""Compiles the kernels of decode steps in parallel, before a step is needed."""

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from itertools import product
from threading import Event
from typing import Any

import triton

from edgeinfer_kernels.cuda.cache.layout import TEXT, Layout
from edgeinfer_kernels.cuda.decode.decode_step import DecodeStep
from edgeinfer_kernels.cuda.decode.step_launches import StepLaunches
from edgeinfer_kernels.cuda.tensor.collective import Alone
from edgeinfer_kernels.cuda.tuning.step_shapes import Tuning

OnCompiled = Callable[[int, int], None]
"""Callback (compiled kernels, all kernels)."""
COMPILERS: int | None = None
"""Number of threads; None: slightly more than there are CPUs."""
AGAIN = 5
"""Number of retries: the first releases of Python 3.11 can fail to parse in several threads at once
(SystemError).
"""
SILENT_SECONDS = 0.5
"""Seconds before progress is reported: kernels that are cached on disk take less."""


class _Compilations(StepLaunches):
    """Compile kernels without launching them."""

    def run(self, kernel: Any, grid: tuple[int, ...], *arguments: Any, **keywords: Any) -> Any:
        return kernel.warmup(*arguments, grid=grid, **keywords)


class _Compilers(ThreadPoolExecutor):
    """Threads that can be stopped before the next kernel; the compiler releases the GIL."""

    def __init__(self) -> None:
        super().__init__(COMPILERS, thread_name_prefix="compiler")
        self.stopped = Event()

    def submit(self, compilation: Callable[[], Any]) -> Future[Any]:  # type: ignore[override]
        return super().submit(self._unless_stopped, compilation)

    @contextmanager
    def stopped_by_errors(self) -> Iterator[None]:
        """An exception within the context, including Ctrl-C, waits only for compilations that are running."""
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


def compile_steps(
    step: DecodeStep,
    widths: Iterable[int],
    on_compiled: OnCompiled | None = None,
    layouts: Iterable[Layout] = (TEXT,),
) -> None:
    """Compile the kernels of steps with these token counts and layouts, on all CPUs.

    Compile errors are ignored here; the launch reports them.
    """
    recording_step = _recording(step, step.launches.tuning)
    with _compiling(on_compiled):
        for width, layout in product(widths, layouts):
            recording_step.layout = layout
            recording_step.launch(width)


def compile_tunings(step: DecodeStep, tunings: Iterable[Tuning], tokens: int) -> None:
    """As `compile_steps`, of steps of `tokens` tokens with other tile configs."""
    with _compiling():
        for tuning in tunings:
            _recording(step, tuning).launch(tokens)


def _recording(step: DecodeStep, tuning: Tuning) -> DecodeStep:
    """A step whose launches are compilations."""
    usual = step.launches
    launches = _Compilations(usual.model, usual.workspace, tuning, dependent=usual.dependent)
    usual_sums = step.collective
    alone = usual_sums and Alone(usual_sums.peers, usual_sums.logit_peers)
    return DecodeStep(launches, step.exchange, alone)


@contextmanager
def _compiling(on_compiled: OnCompiled | None = None) -> Iterator[None]:
    """Compile in parallel what is requested within this context; wait for it at its end."""
    begin = time.perf_counter()
    compilers = _Compilers()
    compiling = triton.AsyncCompileMode(compilers, ignore_errors=True)
    with compilers, compiling, compilers.stopped_by_errors():
        yield
        kernels = compiling.raw_futures
        for done, _ in enumerate(as_completed(kernels), 1):
            if on_compiled is not None and time.perf_counter() - begin > SILENT_SECONDS:
                on_compiled(done, len(kernels))
