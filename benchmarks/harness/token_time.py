"""The time of a decoded token: calls of the kernels, and everything else."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from edgeinfer.benchmarking.measuring import SEED
from edgeinfer.benchmarking.workloads import random_ids
from edgeinfer.engine.protocols import Engine

TOKENS = 64


@dataclass(frozen=True)
class TokenTime:
    """Medians over some tokens, in seconds; `calls`: of the thread pool, per token."""

    total: float
    kernels: float
    """In calls of the thread pool: arithmetic, barriers, and a few microseconds per call."""
    rest: float
    """Embedding, Python between the calls, copy of the logits."""
    calls: float


class TimedThreadPool:
    """Wraps a thread pool and measures the time in its calls."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.seconds = 0.0
        self.calls = 0

    def run(self, *arguments: Any) -> None:
        """As the thread pool's, timed."""
        begin = time.perf_counter()
        self._pool.run(*arguments)
        self.seconds += time.perf_counter() - begin
        self.calls += 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)


def token_time(engine: Engine, tokens: int = TOKENS, seed: int = SEED) -> TokenTime:
    """Decode some tokens with a native engine whose backend has a thread pool."""
    ids = random_ids(tokens + 1, engine.vocabulary_size, seed)
    engine.rewind(0)
    engine.append(ids[:1])
    totals, inside, calls = [], [], 0
    with _timed(engine) as pool:
        for token in ids[1:]:
            before = pool.seconds
            begin = time.perf_counter()
            engine.append([token])
            totals.append(time.perf_counter() - begin)
            inside.append(pool.seconds - before)
        calls = pool.calls
    engine.rewind(0)
    rest = np.subtract(totals, inside)
    return TokenTime(
        float(np.median(totals)), float(np.median(inside)), float(np.median(rest)), calls / tokens
    )


@contextmanager
def _timed(engine: Engine) -> Iterator[TimedThreadPool]:
    backend: Any = getattr(engine, "backend", None)
    if not hasattr(backend, "pool"):
        raise TypeError(f"{type(engine).__name__}: no backend with a thread pool to be timed")
    pool = TimedThreadPool(backend.pool)
    backend.pool = pool
    try:
        yield pool
    finally:
        backend.pool = pool._pool
