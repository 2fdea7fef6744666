"""The thread pool: sleeps when idle, survives forks, serves several callers, ends when closed."""

import os
import threading
import time

import numpy as np
import pytest

from edgeinfer_kernels.backend import BackendError
from edgeinfer_kernels.cpu.compiler.kernel_cache import Kernels
from edgeinfer_kernels.cpu.layout.packed_matrix import address
from edgeinfer_kernels.cpu.runtime.abi import CACHE_LINE
from edgeinfer_kernels.cpu.runtime.thread_pool import ThreadPool


def add_up(kernels: Kernels, pool: ThreadPool) -> int:
    """Let the pool read 1 MiB of ones; returns the sum over its threads' int32 words."""
    memory = np.ones(1 << 18, np.int32)
    sums = np.zeros(CACHE_LINE // 8 * pool.threads, np.int64)
    call = np.array([memory.nbytes, address(sums)], np.int64)
    pool.run(kernels.address("read_memory"), address(memory), address(call))
    return int(sums[:: CACHE_LINE // 8].sum())


@pytest.mark.parametrize("threads", [1, 2, 4, 7])
def test_every_thread_runs_its_share(kernels: Kernels, threads: int) -> None:
    pool = ThreadPool(kernels, threads)
    share = (1 << 20) // threads // 256 * 256
    assert [add_up(kernels, pool) for _ in range(50)] == [share // 4 * threads] * 50
    pool.close()


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_a_schedule_runs_every_step_on_every_thread(kernels: Kernels, threads: int) -> None:
    pool = ThreadPool(kernels, threads)
    memory = np.ones(1 << 16, np.int32)
    sums = [np.zeros(CACHE_LINE // 8 * threads, np.int64) for _ in range(40)]
    calls = [np.array([memory.nbytes, address(each)], np.int64) for each in sums]
    read = kernels.address("read_memory")
    program = np.array([(read, address(memory), address(call), 1) for call in calls], np.int64)
    for _ in range(20):
        for each in sums:
            each[:] = 0
        pool.run(
            kernels.address("run_schedule"), address(program), address(np.array([len(program)], np.int64))
        )
        share = memory.nbytes // threads // 256 * 256 // 4
        assert [each[:: CACHE_LINE // 8].tolist() for each in sums] == [[share] * threads] * len(sums)
    pool.close()


def test_an_idle_pool_resumes(kernels: Kernels) -> None:
    pool = ThreadPool(kernels, 2)
    for pause in (0.0, 0.05, 0.2):
        time.sleep(pause)
        assert add_up(kernels, pool) == 1 << 18
    pool.close()


@pytest.mark.slow
def test_an_idle_pool_uses_no_cpu_time(kernels: Kernels) -> None:
    pool = ThreadPool(kernels, 3)
    add_up(kernels, pool)
    time.sleep(0.3)
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1
    pool.close()


def test_calls_from_several_threads_are_serialized(kernels: Kernels) -> None:
    pool = ThreadPool(kernels, 2)
    result: list[int] = []
    callers = [
        threading.Thread(target=lambda: result.extend(add_up(kernels, pool) for _ in range(50)))
        for _ in range(4)
    ]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert result == [1 << 18] * 200
    pool.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_gets_new_threads(kernels: Kernels) -> None:
    pool = ThreadPool(kernels, 2)
    add_up(kernels, pool)
    child = os.fork()
    if child == 0:
        os._exit(0 if add_up(kernels, pool) == 1 << 18 else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert add_up(kernels, pool) == 1 << 18
    pool.close()


def test_closing_ends_the_threads(kernels: Kernels) -> None:
    before = threading.active_count()
    pool = ThreadPool(kernels, 4)
    assert threading.active_count() == before + 3
    pool.close()
    pool.close()
    assert threading.active_count() == before


def test_closing_while_another_thread_runs_the_pool_ends_both(kernels: Kernels) -> None:
    before = threading.active_count()
    for _ in range(20):
        pool, began, closed = ThreadPool(kernels, 3), threading.Event(), list[BackendError]()

        def run_until_closed(
            pool: ThreadPool = pool, began: threading.Event = began, closed: list[BackendError] = closed
        ) -> None:
            try:
                while True:
                    add_up(kernels, pool)
                    began.set()
            except BackendError as error:
                closed.append(error)

        caller = threading.Thread(target=run_until_closed, daemon=True)
        caller.start()
        assert began.wait(20)
        pool.close()
        caller.join(20)
        assert len(closed) == 1
    assert threading.active_count() == before


def test_an_unreferenced_pool_ends_its_threads(kernels: Kernels) -> None:
    before = threading.active_count()
    pool = ThreadPool(kernels, 3)
    del pool
    assert threading.active_count() == before
