"""Interpreted ranks as forks of one process that has imported all they need: each import takes seconds.

That process is started once by each worker of the tests. It has one thread, so that a fork is safe.
"""

import json
import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import IO, Any

from tests.kernels.cuda.devices import interpreted_rank

MAX_MESSAGE = 1 << 20
"""Bytes of a request, most of them environment variables."""


class ForkedRank:
    """A fork of the prepared process, as `subprocess.Popen`."""

    def __init__(
        self, server: socket.socket, fd: int, stderr: IO[bytes], environment: Mapping[str, str]
    ) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        read, write = os.pipe()
        with theirs, open(read, "rb"):
            fds = [fd, read, stderr.fileno(), theirs.fileno()]
            socket.send_fds(server, [json.dumps(dict(environment)).encode()], fds)
        self.stdin = open(write, "wb")  # noqa: SIM115 - as long as the rank
        self.returncode: int | None = None
        self._status = ours
        self.pid = int(ours.recv(16))

    def poll(self) -> int | None:
        """The exit status, None while it runs."""
        return self._ended(0)

    def wait(self, timeout: float | None = None) -> int:
        """The exit status. Raises `subprocess.TimeoutExpired`."""
        status = self._ended(timeout)
        if status is None:
            assert timeout is not None
            raise subprocess.TimeoutExpired("a rank", timeout)
        return status

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)

    def _ended(self, timeout: float | None) -> int | None:
        if self.returncode is None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._status, selectors.EVENT_READ)
                if selector.select(timeout):
                    self.returncode = int(self._status.recv(16))
                    self._status.close()
        return self.returncode


class RankForks:
    """Starts the process at the first rank. `popen` replaces `subprocess.Popen` for ranks."""

    def __init__(self) -> None:
        self._server: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def popen(self, command: Sequence[str], **options: Any) -> Any:
        """A rank; any other program is started."""
        if command[2] != interpreted_rank.__name__:
            return subprocess.Popen(command, **options)
        if self._server is None:
            self._server, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            with theirs:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", __name__, str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    pass_fds=(theirs.fileno(),),
                    env=options["env"],
                    start_new_session=True,
                )
        return ForkedRank(self._server, int(command[-1]), options["stderr"], options["env"])

    def close(self) -> None:
        """End the process."""
        if self._server is not None and self._process is not None:
            self._server.close()
            self._process.wait()


def serve(server: socket.socket) -> None:
    """Fork a rank for each request, until the tests end."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # what waits for a rank is waited for by no process
    while True:
        message, fds, _, _ = socket.recv_fds(server, MAX_MESSAGE, 4)
        if not fds:
            return
        if os.fork() == 0:
            server.close()
            _watch(json.loads(message), *fds)
        for fd in fds:
            os.close(fd)


def _watch(environment: dict[str, str], pipe: int, stdin: int, stderr: int, status: int) -> None:
    """Fork the rank; send its process id, and its exit status when it has ended."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    rank = os.fork()
    if rank == 0:
        os.close(status)
        os.setsid()
        os.dup2(stdin, 0)
        os.dup2(stderr, 2)
        os.close(stdin)
        os.environ.clear()
        os.environ.update(environment)
        sys.argv = [interpreted_rank.__name__, str(pipe)]
        interpreted_rank.start()  # It ends the process.
    for fd in (pipe, stdin, stderr):
        os.close(fd)
    os.write(status, str(rank).encode())
    os.write(status, str(os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])).encode())
    os._exit(0)


if __name__ == "__main__":
    import_module("tests.kernels.cuda.interpreter")
    serve(socket.socket(fileno=int(sys.argv[1])))
