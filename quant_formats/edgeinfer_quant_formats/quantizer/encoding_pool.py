"""Encodes tensors on all processors: worker processes encode pieces and return them in order.

Processes instead of threads: numpy holds the interpreter lock for a third of the time on pieces that fit a
CPU cache, and larger pieces are limited by memory. The workers are plain interpreters with pipes, so that a
quantization script needs no `if __name__ == "__main__"`.
"""

import contextlib
import os
import pickle
import queue
import subprocess
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, BinaryIO, Self, cast

import numpy as np
from numpy.typing import NDArray

from edgeinfer_quant_formats.codecs import decode, encode
from edgeinfer_quant_formats.errors import FormatError
from edgeinfer_quant_formats.system.processes import apart_from_terminal

# Pieces in flight per worker, so that no worker waits while the file is written.
AHEAD = 2
_START = "import sys; sys.path[:] = {path!r}; from edgeinfer_quant_formats.quantizer import encoding_pool; "
_START += "encoding_pool.serve(sys.stdin.buffer, sys.stdout.buffer)"


@dataclass(frozen=True, slots=True)
class Piece:
    """Whole rows of one tensor: their blocks, and the target format."""

    name: str
    raw: bytes
    source: str
    target: str
    importance: NDArray[np.float32] | None


class WorkerError(OSError):
    """A worker process has ended unexpectedly."""


def recode(piece: Piece) -> bytes:
    """The piece in its target format.

    Raises:
        FormatError: weights that the format can't hold.
    """
    weights = decode(piece.raw, piece.source)
    try:
        out = encode(weights, piece.target, piece.importance)
        if piece.target == "F16" and np.isinf(out.view("<f2")).any() and np.isfinite(weights).all():
            raise FormatError(f"weights up to {np.abs(weights).max():g}, wanted at most 65504 for F16")
    except FormatError as error:
        raise FormatError(f"tensor {piece.name}: {error}") from None
    return out.tobytes()


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """The main loop of a worker: encode pieces until the pipe closes."""
    while True:
        try:
            piece = pickle.load(requests)
        except EOFError:
            return
        try:
            reply: bytes | FormatError = recode(piece)
        except FormatError as error:
            reply = error
        pickle.dump(reply, replies, protocol=5)
        replies.flush()


class EncodingPool:
    """Encodes pieces on `processes` workers, or in this process if that is 1.

    As a context manager it always ends its workers.
    """

    def __init__(self, processes: int) -> None:
        # A program that embeds Python may have no interpreter path.
        self._count = processes if processes > 1 and sys.executable else 0
        self.workers: list[subprocess.Popen[bytes]] = []
        self._free: queue.SimpleQueue[subprocess.Popen[bytes]] = queue.SimpleQueue()
        self._threads = ThreadPoolExecutor(max_workers=max(self._count, 1))

    def __enter__(self) -> Self:
        try:
            for _ in range(self._count):
                self.workers.append(_start_worker())
                self._free.put(self.workers[-1])
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *failure: object) -> None:
        self.close()

    def close(self) -> None:
        """End the workers; pieces in flight are lost."""
        for worker in self.workers:
            worker.kill()
        self._threads.shutdown(wait=True, cancel_futures=True)
        for worker in self.workers:
            for pipe in (worker.stdin, worker.stdout):
                with contextlib.suppress(OSError):
                    cast(Any, pipe).close()
            worker.wait()
        self.workers.clear()

    def recoded(self, pieces: Iterable[Callable[[], Piece]]) -> Iterator[bytes]:
        """The pieces in their target formats, in order. Each is created shortly before it is encoded.

        Raises:
            FormatError: weights that a format can't hold.
            WorkerError: a worker has ended unexpectedly.
        """
        if not self._count:
            for make in pieces:
                yield recode(make())
            return
        under_way: deque[Future[bytes]] = deque()
        for make in pieces:
            under_way.append(self._threads.submit(self._send, make))
            if len(under_way) >= AHEAD * self._count:
                yield under_way.popleft().result()
        while under_way:
            yield under_way.popleft().result()

    def _send(self, make: Callable[[], Piece]) -> bytes:
        piece = make()
        worker = self._free.get()
        try:
            stdin, stdout = cast(BinaryIO, worker.stdin), cast(BinaryIO, worker.stdout)
            pickle.dump(piece, stdin, protocol=5)
            stdin.flush()
            reply = pickle.load(stdout)
        except (EOFError, OSError, pickle.UnpicklingError) as error:
            raise WorkerError(
                f"tensor {piece.name}: a worker process ended with code {worker.poll()}, wanted its result; "
                "try again with fewer threads"
            ) from error
        finally:
            self._free.put(worker)
        if isinstance(reply, FormatError):
            raise reply
        return cast(bytes, reply)


def _start_worker() -> subprocess.Popen[bytes]:
    # Ctrl-C reaches only the parent, which then ends the workers.
    single = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, "-c", _START.format(path=[entry or os.getcwd() for entry in sys.path])],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=os.environ | single,
        **apart_from_terminal(),
    )
