"""What is measured: our engine on its public path, llama.cpp through its C API, behind one protocol."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from edgeinfer.engine.kv_cache import KVCache
from edgeinfer.engine.protocols import Engine
from edgeinfer.llama_cpp.context import LlamaCppContext

LLAMA_CPP = "llama.cpp"
REST_SLICE_SECONDS = 0.002
REST_MOST_SECONDS = 0.5
IDLE_SHARE = 0.1


class BenchTarget(Protocol):
    """Reads tokens as fast as it can."""

    name: str

    vocabulary_size: int

    def read(self, ids: Sequence[int]) -> None:
        """Read `ids` behind what the cache holds; logits of the last come out."""
        ...

    def read_all(self, ids: Sequence[int]) -> None:
        """Read `ids`; logits of each come out."""
        ...

    def rewind(self, length: int) -> None:
        """Forget all but the first `length` tokens."""
        ...


class NativeTarget:
    """The engine of a loaded model."""

    name = "edgeinfer"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.vocabulary_size = engine.vocabulary_size

    def read(self, ids: Sequence[int]) -> None:
        self._engine.append(ids)

    def read_all(self, ids: Sequence[int]) -> None:
        self._engine.append_all(ids)

    def rewind(self, length: int) -> None:
        self._engine.rewind(length)


class LlamaCppTarget:
    """llama.cpp on the same file."""

    name = LLAMA_CPP

    def __init__(self, path: Path, context: int, threads: int, kv: str = "f16") -> None:
        self._context = LlamaCppContext(path, context, threads, "--vs llama.cpp", kv)
        self.vocabulary_size = self._context.vocabulary_size
        self.describe = self._context.describe
        self.close = self._context.close

    def read(self, ids: Sequence[int]) -> None:
        self._context.read(ids)

    def rewind(self, length: int) -> None:
        self._context.rewind(length)

    def read_all(self, ids: Sequence[int]) -> None:
        self._context.read_all(ids)


def bytes_per_token(engine: Engine, depth: float) -> float:
    """Bytes that decoding one token reads at this depth: weights, and keys and values where they're known."""
    cache = getattr(engine, "cache", None)
    layers = cache.layers if isinstance(cache, KVCache) else []
    return engine.bytes_per_token + depth * sum(layer.nbytes / layer.positions for layer in layers)


def rest() -> float:
    """Wait until no thread of this process spins, so that one team's end doesn't slow another's start.

    Teams poll for a while when their work is done. Returns the seconds waited, half a second at most.
    """
    begin = time.perf_counter()
    while time.perf_counter() - begin < REST_MOST_SECONDS:
        wall, used = time.perf_counter(), time.process_time()
        time.sleep(REST_SLICE_SECONDS)
        if time.process_time() - used < IDLE_SHARE * (time.perf_counter() - wall):
            break
    return time.perf_counter() - begin
