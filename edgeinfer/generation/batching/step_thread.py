"""The thread that runs the steps of pushed requests, such as those of asynchronous streams."""

import os
import threading

from edgeinfer.engine.guards import ModelLock
from edgeinfer.generation.batching.scheduler import Scheduler
from edgeinfer_kernels.system.locks import fork_safe_lock


class StepThread:
    """Runs the scheduler's steps on one thread while asynchronous streams are unfinished."""

    def __init__(self, scheduler: Scheduler, lock: ModelLock) -> None:
        self._scheduler = scheduler
        self._lock = lock
        self._guard = fork_safe_lock()
        self._process: int | None = None
        """The process in which the thread runs; None: it doesn't."""

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
                try:
                    self._scheduler.step()
                except Exception as error:  # a bug: no reader may wait forever
                    self._scheduler.fail(error)
