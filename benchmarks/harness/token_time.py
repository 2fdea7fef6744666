"""Where the time of a decoded token goes: kernels, as seen from outside, and everything around them."""

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
    """Medians over some tokens, in seconds; `calls`: of the thread team, a token."""

    total: float
    kernels: float
    """Inside the team's calls: arithmetic and barriers, and the few microseconds that a call takes."""
    rest: float
    """Embedding, Python between the calls, logits copied out."""
    calls: float


class TimedThreadPool:
    """Stands before a thread team and counts the time inside its calls."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.seconds = 0.0
        self.calls = 0

    def run(self, *arguments: Any) -> None:
        """As the team's, timed."""
        begin = time.perf_counter()
        self._pool.run(*arguments)
        self.seconds += time.perf_counter() - begin
        self.calls += 1

    def __getattr__(self, name: str) -> Any:
        return getattr(self._pool, name)


def token_time(engine: Engine, tokens: int = TOKENS, seed: int = SEED) -> TokenTime:
    """Decode some tokens with an engine of ours whose backend has a thread team."""
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
        raise TypeError(f"{type(engine).__name__}: no backend with a thread team to be timed")
    pool = TimedThreadPool(backend.pool)
    backend.pool = pool
    try:
        yield pool
    finally:
        backend.pool = pool._pool
