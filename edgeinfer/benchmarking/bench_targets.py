"""The engines to measure, with one protocol: ours through its public API, llama.cpp through its C API."""

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.engine.protocols import Engine
from edgeinfer.llama_cpp.context import LlamaCppContext
from edgeinfer_kernels.blocks.attention import AttentionSpec
from edgeinfer_kernels.caches.layer_cache import LayerCache

LLAMA_CPP = "llama.cpp"
IDLE_CHECK_SECONDS = 0.002
MAX_IDLE_WAIT_SECONDS = 0.5
IDLE_SHARE = 0.1


class BenchTarget(Protocol):
    """An engine that processes tokens at full speed."""

    name: str

    vocabulary_size: int

    def read(self, ids: Sequence[int]) -> None:
        """Append `ids` to the KV cache; logits of the last token are computed."""
        ...

    def read_all(self, ids: Sequence[int]) -> None:
        """Append `ids`; logits of each token are computed."""
        ...

    def rewind(self, length: int) -> None:
        """Truncate the KV cache to the first `length` tokens."""
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
    """Bytes read to decode one token at this depth: weights, plus the KV cache if known."""
    if not isinstance(engine, NativeEngine):
        return engine.bytes_per_token
    return engine.bytes_per_token + _cache_share(engine, depth) * engine.cache.nbytes


def _cache_share(engine: NativeEngine, depth: float) -> float:
    """The share of the KV cache that a token at this depth reads; with a window, at most the window."""
    context, read, held = engine.context, 0.0, 0.0
    for block in engine.specification.specs(AttentionSpec):
        width = block.kv_heads * block.head_dim
        read += width * block.read_positions(depth)
        if block.source_layer is None:
            held += width * LayerCache.positions_for(block.cached_positions(context))
    return read / held if held else depth / LayerCache.positions_for(context)


def wait_until_idle() -> float:
    """Wait until no thread of this process spins, so that one thread pool doesn't slow the other.

    Thread pools poll for a while after their work. Returns the seconds waited, at most 0.5.
    """
    begin = time.perf_counter()
    while time.perf_counter() - begin < MAX_IDLE_WAIT_SECONDS:
        wall, used = time.perf_counter(), time.process_time()
        time.sleep(IDLE_CHECK_SECONDS)
        if time.process_time() - used < IDLE_SHARE * (time.perf_counter() - wall):
            break
    return time.perf_counter() - begin
