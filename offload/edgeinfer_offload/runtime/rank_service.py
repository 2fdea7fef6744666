"""What the process of a rank executes: it loads its part, then runs the commands of `rank_processes.py`."""

import os
import pickle
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, NoReturn, Protocol

PROGRESS = "progress"


class Message(NamedTuple):
    """A command for all ranks. `number` rises by one: a rank skips one that it has already got."""

    number: int
    method: str
    arguments: tuple[Any, ...]


class Reply(NamedTuple):
    """A rank's result of a message. `error`: the name of its exception, whose text is the `value`; "": none.
    PROGRESS as `error`: no result, but the loaded bytes and all bytes so far.
    """

    number: int
    value: Any
    error: str = ""


class RankService(Protocol):
    """A loaded part; its public methods are the commands. Every rank replies with the results of the methods
    in `each_replies`, the first one with those of the others.
    """

    rank: int
    each_replies: frozenset[str]

    def ready(self) -> Any:
        """What the model's process needs to know."""
        ...


Loading = Callable[[Any, Callable[[int, int], None]], RankService]
"""Loads the part of a job; its second argument is called with the loaded bytes and all bytes."""


def run_rank(load: Loading) -> NoReturn:
    """Serve the pipe whose file descriptor is the program's argument, until it or the standard input ends.

    The other ranks may have ended then: the process group isn't left in order.
    """
    threading.Thread(target=_end_with_input, daemon=True).start()
    try:
        _serve(Connection(int(sys.argv[1])), load)
    except (EOFError, OSError):
        os._exit(0)  # The model's process has closed the pipe.
    except BaseException:
        sys.excepthook(*sys.exc_info())
        sys.stderr.flush()
    os._exit(1)


def _end_with_input() -> None:
    """End this process when the model's process has ended, even if a GPU waits for another rank forever."""
    sys.stdin.buffer.read()
    os._exit(0)


def _serve(pipe: Connection, load: Loading) -> None:
    """Load the part that the first message names, then execute commands until the pipe ends."""

    def send(reply: Reply) -> None:
        pipe.send_bytes(pickle.dumps(reply, pickle.HIGHEST_PROTOCOL))

    first: Message = pickle.loads(pipe.recv_bytes())
    try:
        service = load(first.arguments[0], lambda done, total: send(Reply(0, (done, total), PROGRESS)))
        ready = service.ready()
    except Exception as error:
        send(Reply(0, line_of(error), type(error).__name__))
        while True:  # until the pipe ends: then all ranks have reported theirs
            pipe.recv_bytes()
    send(Reply(0, ready))
    last = 0
    while True:
        message: Message = pickle.loads(pipe.recv_bytes())
        if message.number > last:
            last = message.number
            send(_executed(service, message))


def _executed(service: RankService, message: Message) -> Reply:
    try:
        value = getattr(service, message.method)(*message.arguments)
    except Exception as error:
        return Reply(message.number, line_of(error), type(error).__name__)
    replies = service.rank == 0 or message.method in service.each_replies
    return Reply(message.number, value if replies else None)


def line_of(error: Exception) -> str:
    """The text of an exception in one line."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
