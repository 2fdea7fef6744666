"""The processes of tensor parallel: one for each GPU, started and ended by the process that has the model.

Commands and results are pickled through a pipe for each rank. A rank ends when its standard input ends, so
that none is left if this process is killed. If one ends, the others may wait for it forever on their GPUs:
all are killed then.
"""

import contextlib
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import IO, Any, NoReturn

from edgeinfer_kernels.backend import BackendError
from edgeinfer_offload.runtime.rank_service import PROGRESS, Message, Reply

START_SECONDS = 1800.0
"""Maximum seconds until all ranks are ready: a large model is read from a slow disk."""
LATE_SECONDS = 3.0
"""Seconds that ranks get for their results after another one has failed, or to end."""
MAX_DIRECT_BYTES = 1 << 14
"""Maximum bytes of a message that is written at once; an interrupted write may be repeated."""
ENDED = "ended"
"""The `error` of a reply that is the end of a pipe."""
KILLED = (9, 15)
"""The signals with which other programs end a process."""
REMEDY = "load the model again"


class RankError(Exception):
    """An exception that all ranks raised; `kind`: the name of its class."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


@dataclass
class _Rank:
    name: str
    process: subprocess.Popen[bytes]
    pipe: Connection
    stderr: IO[bytes]

    def ending(self) -> str:
        """How it ended: its exit status or signal, and the last line of its error output, unless another
        program killed it.
        """
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(LATE_SECONDS)
        self.stderr.seek(0)
        lines = [line.strip() for line in self.stderr.read().decode(errors="replace").splitlines()]
        text = next((line for line in reversed(lines) if line), "")
        code = self.process.returncode
        if code is None:
            return "has closed its pipe"
        if -code in KILLED:
            return f"ended by signal {-code}"
        ended = f"ended by signal {-code}" if code < 0 else f"ended with status {code}"
        return f"{ended}: {text}" if text else ended


class RankProcesses:
    """The ranks, each executing `module` with one of the `jobs`, which are pickled. These are called with the
    path of a file that doesn't exist yet, by which the ranks find each other. `names`: their GPUs.

    `ready`: what each rank returned when it had loaded its part.

    Raises:
        RankError: all ranks raised an exception.
        BackendError: a rank has ended or failed.
    """

    def __init__(
        self,
        module: str,
        jobs: Callable[[str], Sequence[Any]],
        names: Sequence[str],
        on_progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self._ranks: list[_Rank] = []
        self._number = 0
        self._failure = ""
        self._on_progress = on_progress
        self._owner = os.getpid()
        self._replies: SimpleQueue[tuple[int, Reply]] = SimpleQueue()
        self._sender: threading.Thread | None = None
        self._folder = tempfile.TemporaryDirectory(prefix="edgeinfer-ranks-", ignore_cleanup_errors=True)
        """As long as the ranks: the threads of torch.distributed read its file."""
        self._reader = threading.Thread(target=self._receive, daemon=True)
        try:
            for name in names:
                self._ranks.append(_started(module, name))
            self._reader.start()
            store = str(Path(self._folder.name) / "store")
            for rank, job in zip(self._ranks, jobs(store), strict=True):
                with contextlib.suppress(OSError):  # it has ended, which its pipe reports
                    rank.pipe.send_bytes(pickle.dumps(Message(0, "", (job,))))
            self.ready = self._results(0, START_SECONDS)
        except BaseException:
            self.close()
            raise

    @property
    def process_ids(self) -> list[int]:
        """Those of the ranks that run."""
        return [rank.process.pid for rank in self._ranks if rank.process.poll() is None]

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """What each rank returns for this method, in their order. Raises as the constructor; after a
        `BackendError` all ranks have ended.
        """
        if self._failure:
            raise BackendError(self._failure)
        self._number += 1
        self._send(pickle.dumps(Message(self._number, method, arguments), pickle.HIGHEST_PROTOCOL))
        return self._results(self._number)

    def _send(self, message: bytes) -> None:
        """Send a message to all ranks, also if Ctrl-C interrupts it: the ranks wait for each other."""
        if self._sender is not None:
            self._sender.join()
        if len(message) > MAX_DIRECT_BYTES:  # Only a thread's write isn't interrupted.
            self._sender = threading.Thread(target=self._write, args=(message,), daemon=True)
            self._sender.start()
            self._sender.join()
            return
        try:
            self._write(message)
        except BaseException:
            self._write(message)  # Ranks that have it skip it.
            raise

    def _write(self, message: bytes) -> None:
        for rank in self._ranks:
            with contextlib.suppress(OSError):  # it has ended, which its pipe reports
                rank.pipe.send_bytes(message)

    def _receive(self) -> None:
        """The reading thread: Ctrl-C can't interrupt it within a reply."""
        pipes = {rank.pipe: at for at, rank in enumerate(self._ranks)}
        while pipes:
            for pipe in wait(list(pipes)):
                assert isinstance(pipe, Connection)
                at = pipes[pipe]
                try:
                    self._replies.put((at, pickle.loads(pipe.recv_bytes())))
                except (EOFError, OSError):
                    del pipes[pipe]
                    self._replies.put((at, Reply(0, "", ENDED)))

    def _results(self, number: int, seconds: float | None = None) -> list[Any]:
        """The ranks' replies to a message; those to earlier ones, that were interrupted, are dropped. Once
        there is an error, the others get LATE_SECONDS.
        """
        replies: dict[int, Reply] = {}
        deadline = None if seconds is None else time.monotonic() + seconds
        while len(replies) < len(self._ranks):
            try:
                left = None if deadline is None else max(0.0, deadline - time.monotonic())
                at, reply = self._replies.get(timeout=left)
            except Empty:
                break
            if reply.error == ENDED:
                rank = self._ranks[at]
                self._fail(f"the process of {rank.name} {rank.ending()}")
            if reply.error == PROGRESS:
                if self._on_progress is not None and at == 0:
                    self._on_progress(*reply.value)
            elif reply.number == number:
                replies[at] = reply
                if reply.error:
                    late = time.monotonic() + LATE_SECONDS
                    deadline = late if deadline is None else min(deadline, late)
        return self._values(replies)

    def _values(self, replies: dict[int, Reply]) -> list[Any]:
        """The values of all replies. The other ranks wait for one that has failed: all are ended."""
        errors = [(at, reply) for at, reply in sorted(replies.items()) if reply.error]
        if len(errors) == len(self._ranks):
            raise RankError(errors[0][1].error, str(errors[0][1].value))
        if errors:
            at, first = errors[0]
            self._fail(f"the process of {self._ranks[at].name} failed ({first.value})")
        if len(replies) < len(self._ranks):
            late = next(rank for at, rank in enumerate(self._ranks) if at not in replies)
            self._fail(f"the process of {late.name} wasn't ready in {START_SECONDS:.0f} s")
        return [replies[at].value for at in range(len(self._ranks))]

    def _fail(self, reason: str) -> NoReturn:
        self._failure = f"{reason}; {REMEDY}"
        self._end(0.0)
        raise BackendError(self._failure)

    def close(self) -> None:
        """End all ranks."""
        if self._owner == os.getpid():  # after a fork they belong to the parent
            self._failure = self._failure or f"the model has been closed; {REMEDY}"
            self._end(LATE_SECONDS)

    def _end(self, seconds: float) -> None:
        """End the ranks: those that don't end by themselves within these seconds are killed."""
        ranks, deadline = list(self._ranks), time.monotonic() + seconds
        for rank in ranks:
            if rank.process.stdin is not None:
                with contextlib.suppress(OSError):
                    rank.process.stdin.close()
        for rank in ranks:
            try:
                rank.process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                rank.process.kill()
                rank.process.wait()
        if self._reader.is_alive():
            self._reader.join()
        for rank in ranks:
            rank.pipe.close()
            rank.stderr.close()
        self._ranks.clear()
        self._folder.cleanup()


def _started(module: str, name: str) -> _Rank:
    """A process that executes the module, which gets its end of the pipe as a file descriptor."""
    ours, theirs = Pipe()
    stderr: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the process
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(folder for folder in sys.path if folder)}
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            pass_fds=(theirs.fileno(),),
            env=environment,
            start_new_session=True,  # Ctrl-C is for this process only
        )
    finally:
        theirs.close()
    return _Rank(name, process, ours, stderr)
