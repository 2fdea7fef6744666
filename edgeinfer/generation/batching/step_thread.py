"""The thread that runs the steps of pushed requests, such as those of asynchronous streams."""

import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import TYPE_CHECKING

from edgeinfer.engine.guards import ModelLock
from edgeinfer.generation.batching.scheduler import Scheduler
from edgeinfer_kernels.system.locks import fork_safe_lock

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop, Event


class StepThread:
    """Runs the scheduler's steps on one thread while asynchronous streams are unfinished."""

    def __init__(self, scheduler: Scheduler, lock: ModelLock) -> None:
        self._scheduler = scheduler
        self._lock = lock
        self._guard = fork_safe_lock()
        self._process: int | None = None
        """The process in which the thread runs; None: it doesn't."""
        self._changes: dict[AbstractEventLoop, list[Event]] | None = None
        """The streams that the step of this thread has advanced; None: no step runs here."""

    def wake(self) -> None:
        """Run steps until no stream needs any."""
        with self._guard:
            if self._process != os.getpid():
                self._process = os.getpid()
                threading.Thread(target=self._run, name="edgeinfer-steps", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._guard:
                if not self._scheduler.has_work:
                    self._process = None
                    return
            with self._lock:
                self._changes = {}
                try:
                    self._scheduler.step()
                except Exception as error:  # a bug: no reader may wait forever
                    self._scheduler.fail(error)
                changes, self._changes = self._changes, None
            for loop, events in changes.items():
                _set_all(loop, events)

    def report(self, loop: "AbstractEventLoop", changed: "Event") -> None:
        """Set a stream's event: with those of the same step, because waking an event loop takes as long as
        the rest of a token's work. The caller holds the model's lock.
        """
        if self._changes is None:
            _set_all(loop, [changed])
        else:
            self._changes.setdefault(loop, []).append(changed)


def _set_all(loop: "AbstractEventLoop", events: "Sequence[Event]") -> None:
    def set_all() -> None:
        for event in events:
            event.set()

    with suppress(RuntimeError):  # the loop has been closed: nothing waits
        loop.call_soon_threadsafe(set_all)
