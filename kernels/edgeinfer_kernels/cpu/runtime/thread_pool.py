"""Python interface of the thread pool: started once per model, run for every block, shut down at the end."""

import ctypes
import os
import platform
import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager

from edgeinfer_kernels.backend import BackendError
from edgeinfer_kernels.cpu.compiler.kernel_cache import Kernels
from edgeinfer_kernels.cpu.runtime.abi import CACHE_LINE
from edgeinfer_kernels.cpu.runtime.kernel_args import ThreadPoolArgs
from edgeinfer_kernels.system.locks import fork_safe_lock

FUTEX_NUMBERS = {"x86_64": 202, "aarch64": 98}
SLEEP_MICROSECONDS = 500


def address_of(function: object) -> int:
    return ctypes.cast(function, ctypes.c_void_p).value or 0  # type: ignore[arg-type]


class ThreadPool:
    """Runs `function(block, step, pool, thread)` on all its threads at once.

    Safe to call from several Python threads (calls are serialized) and after a fork (the threads are
    restarted).
    """

    def __init__(self, kernels: Kernels, threads: int) -> None:
        self.threads = threads
        self._kernels = kernels
        self._run = kernels.function("pool_run", 4)
        self._serve = kernels.function("pool_serve", 3)
        self._shutdown = kernels.function("pool_shutdown", 1)
        self._lock = fork_safe_lock()
        self._start()

    def _start(self) -> None:
        self._process = os.getpid()
        self._memory = ctypes.create_string_buffer(ctypes.sizeof(ThreadPoolArgs) + CACHE_LINE)
        self.address = -(-ctypes.addressof(self._memory) // CACHE_LINE) * CACHE_LINE
        args = ThreadPoolArgs.from_address(self.address)
        self._use_operating_system(args)
        args.threads = self.threads
        workers = [
            threading.Thread(target=self._serve, args=(self.address, thread, 0), daemon=True)
            for thread in range(1, self.threads)
        ]
        for worker in workers:
            worker.start()
        kept_alive = (self._memory, self._kernels, self._functions)
        self._end = weakref.finalize(
            self, _shutdown, self._process, self._lock, self._shutdown, self.address, workers, kept_alive
        )

    def _use_operating_system(self, args: ThreadPoolArgs) -> None:
        """Set the C functions with which a thread yields or sleeps while it waits."""
        if sys.platform == "win32":
            library = ctypes.windll.kernel32
            self._functions = [library.SwitchToThread, library.Sleep]
            args.sleep_argument = 1
        else:
            library = ctypes.CDLL(None)
            self._functions = [library.sched_yield, library.usleep]
            args.sleep_argument = SLEEP_MICROSECONDS
        args.yield_function, args.sleep_function = map(address_of, self._functions)
        if sys.platform == "linux" and platform.machine() in FUTEX_NUMBERS:
            self._functions.append(library.syscall)
            args.syscall_function = address_of(library.syscall)
            args.futex = FUTEX_NUMBERS[platform.machine()]

    def run(self, function: int, block: int, step: int) -> None:
        """Run the kernel at address `function` on every thread; return when all are done.

        Raises `BackendError`: the pool is closed, as at the end of the program.
        """
        with self._lock:
            if os.getpid() != self._process:
                self._end.detach()
                self._start()
            elif not self._end.alive:
                raise BackendError("the model has been closed; load it again")
            self._run(self.address, function, block, step)

    def close(self) -> None:
        """End the threads; the pool is unusable afterwards. Runs automatically on garbage collection."""
        self._end()


def _shutdown(
    process: int,
    lock: AbstractContextManager[object],
    shutdown: Callable[[int], None],
    address: int,
    workers: list[threading.Thread],
    kept_alive: tuple[object, ...],
) -> None:
    """Shut the threads down after the current run and join them: their code and memory must outlive them."""
    if os.getpid() != process:  # A forked child has no threads.
        return
    with lock:
        shutdown(address)
    for worker in workers:
        worker.join()
