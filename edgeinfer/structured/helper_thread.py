"""A background thread for short tasks: a submission costs some microseconds, a tenth of a pool's."""

import os
import threading
import weakref
from collections.abc import Callable
from queue import SimpleQueue
from typing import Generic, TypeVar

Result = TypeVar("Result")


class PendingResult(Generic[Result]):
    """A pending result of the thread."""

    def __init__(self, work: Callable[[], Result]) -> None:
        self._work = work
        self._found: SimpleQueue[tuple[Result, None] | tuple[None, BaseException]] = SimpleQueue()

    def run(self) -> None:
        try:
            self._found.put((self._work(), None))
        except BaseException as error:
            self._found.put((None, error))

    def result(self) -> Result:
        """Wait for the result, once; raises the task's exception."""
        result, error = self._found.get()
        if error is not None:
            raise error
        return result  # type: ignore[return-value]


class HelperThread:
    """Runs tasks in order; ends when it is no longer referenced. A forked child, in which the thread does not
    exist, starts another one.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._start()

    def _start(self) -> None:
        self._process = os.getpid()
        self._tasks: SimpleQueue[PendingResult[object] | None] = SimpleQueue()
        threading.Thread(target=_serve, args=(self._tasks,), name=self._name, daemon=True).start()
        weakref.finalize(self, self._tasks.put, None)

    def do(self, work: Callable[[], Result]) -> PendingResult[Result]:
        """Submit a task to the thread."""
        if os.getpid() != self._process:
            self._start()
        coming = PendingResult(work)
        self._tasks.put(coming)  # type: ignore[arg-type]
        return coming


def _serve(tasks: "SimpleQueue[PendingResult[object] | None]") -> None:
    while (coming := tasks.get()) is not None:
        coming.run()
