"""One progress line on stderr for a long wait, erased at the end."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from types import TracebackType
from typing import Self, TextIO

from edgeinfer_tui.output.terminal_output import control

DELAY_SECONDS = 1.0
BUILDING = "compiling kernels for this machine, once"
REDRAW_SECONDS = 0.1
ERASE = "\r\x1b[K"


class TransientLine(ABC):
    """A context manager that erases its line on exit."""

    @abstractmethod
    def erase(self) -> None:
        """Erase the line."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.erase()


class ProgressLine:
    """Shows `label done/total` on a terminal once a wait has taken a second."""

    def __init__(
        self,
        label: str,
        stream: TextIO,
        clock: Callable[[], float] = time.monotonic,
        shown: Callable[[int], str] = str,
        time_left: bool = False,
        at_once: bool = False,
    ) -> None:
        """`at_once`: show the line from the first call on, because the operation is long; if stderr is no
        terminal, the line is written once.
        """
        self._label = label
        self._delay = 0.0 if at_once else DELAY_SECONDS
        self._announces = at_once and not stream.isatty()
        self._shown = shown
        self._time_left = time_left
        self._stream = stream
        self._clock = clock
        self._start = clock()
        self._painted_at = float("-inf")
        self._enabled = stream.isatty()

    def update(self, done: int, total: int) -> None:
        """The progress callback: `done` of `total`."""
        now = self._clock()
        if self._announces:
            self._announces = False
            self._stream.write(f"edgeinfer: {self._label}, {self._shown(total)} in all\n")
            self._stream.flush()
        if not self._enabled or now - self._start < self._delay or now - self._painted_at < REDRAW_SECONDS:
            return
        self._painted_at = now
        share = f" ({done / total:.0%})" if total else ""
        left = (
            f", {shown_time((now - self._start) / done * (total - done))} left" if self._is_due(done) else ""
        )
        control(self._stream, ERASE)
        self._stream.write(f"{self._label} {self._shown(done)}/{self._shown(total)}{share}{left}")
        self._stream.flush()

    def _is_due(self, done: int) -> bool:
        return self._time_left and done > 0

    def erase(self) -> None:
        """Erase the line."""
        if self._painted_at > float("-inf"):
            control(self._stream, ERASE)
            self._stream.flush()
            self._painted_at = float("-inf")


def shown_ago(seconds: float) -> str:
    """Time since an event: now, 12 min ago, 3 days ago."""
    if seconds < 60:
        return "now"
    return f"{shown_time(seconds)} ago" if seconds < 48 * 3600 else f"{seconds / 86400:.0f} days ago"


def shown_time(seconds: float, exact: bool = False) -> str:
    """A duration: 40 s, 12 min, 3.5 h; `exact`: 0.21 s, 5.3 s, 40.0 s below 90 s."""
    if seconds < 90:
        digits = 0 if not exact else 2 if seconds < 1 else 1
        return f"{seconds:.{digits}f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
