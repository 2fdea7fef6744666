"""Python interface of the thread pool: started once per model, run for every block, shut down at the end."""

import ctypes
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager

from edgeinfer_kernels.backend import BackendError
from edgeinfer_kernels.cpu.compiler.kernel_cache import Kernels
from edgeinfer_kernels.cpu.runtime.abi import CACHE_LINE
from edgeinfer_kernels.cpu.runtime.kernel_args import ThreadPoolArgs
from edgeinfer_kernels.system.locks import call_in_child, fork_safe_lock
from edgeinfer_kernels.system.waiting import wait_functions

WAIT_FIELDS = (
    *("yield_function", "sleep_function", "sleep_argument"),
    *("wait_kind", "wait_function", "wake_function", "futex"),
)


class ThreadPool:
    """Runs `function(block, step, pool, thread)` on all its threads at once.

    Safe to call from several Python threads (calls are serialized) and after a fork (the threads are
    restarted).
    """

    def __init__(self, kernels: Kernels, threads: int) -> None:
        self.threads = threads
        self.checks: list[Callable[[], None]] = []
        """Called after each run; they raise what kernels can't."""
        self._kernels = kernels
        self._run = kernels.function("pool_run", 4)
        self._serve = kernels.function("pool_serve", 3)
        self._shutdown = kernels.function("pool_shutdown", 1)
        self._lock = fork_safe_lock()
        call_in_child(self._forked)
        self._start()

    def _forked(self) -> None:
        """This is a forked child, which has none of the threads."""
        self._is_in_child = True

    def _start(self) -> None:
        self._process, self._is_in_child = os.getpid(), False
        nbytes = ctypes.sizeof(ThreadPoolArgs)
        self._memory = ctypes.create_string_buffer(nbytes + CACHE_LINE * (1 + self.threads))
        self.address = -(-ctypes.addressof(self._memory) // CACHE_LINE) * CACHE_LINE
        args = ThreadPoolArgs.from_address(self.address)
        waiting = wait_functions()
        for name in WAIT_FIELDS:
            setattr(args, name, getattr(waiting, name))
        args.threads, args.arrivals = self.threads, self.address + nbytes
        workers = [
            threading.Thread(target=self._serve, args=(self.address, thread, 0), daemon=True)
            for thread in range(1, self.threads)
        ]
        for worker in workers:
            worker.start()
        self._open = [True]
        """Empty after the end: `weakref.finalize.alive` runs Python code before every run."""
        kept_alive = (self._memory, self._kernels, waiting)
        ending = self._process, self._lock, self._open, self._shutdown, self.address, workers, kept_alive
        self._end = weakref.finalize(self, _shutdown, *ending)

    def run(self, function: int, block: int, step: int) -> None:
        """Run the kernel at address `function` on every thread; return when all are done.

        Raises `BackendError`: the pool is closed, as at the end of the program.
        """
        with self._lock:
            if self._is_in_child:
                self._end.detach()
                self._start()
            elif not self._open:
                raise BackendError("the model has been closed; load it again")
            self._run(self.address, function, block, step)
        for check in self.checks:
            check()

    def close(self) -> None:
        """End the threads; the pool is unusable afterwards. Runs automatically on garbage collection."""
        self._end()


def _shutdown(
    process: int,
    lock: AbstractContextManager[object],
    opened: list[bool],
    shutdown: Callable[[int], None],
    address: int,
    workers: list[threading.Thread],
    kept_alive: tuple[object, ...],
) -> None:
    """Shut the threads down after the current run and join them: their code and memory must outlive them."""
    if os.getpid() != process:  # A forked child has no threads.
        return
    with lock:
        opened.clear()
        shutdown(address)
    for worker in workers:
        worker.join()
