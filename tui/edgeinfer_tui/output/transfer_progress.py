"""Download progress on stderr: bytes, rate, remaining time."""

import time
from collections import deque
from collections.abc import Callable
from typing import TextIO

from edgeinfer_tui.output.columns import shown_bytes
from edgeinfer_tui.output.progress_line import ERASE, REDRAW_SECONDS, TransientLine, shown_time
from edgeinfer_tui.output.terminal_output import control

WINDOW_SECONDS = 10.0
"""The rate is averaged over the last `WINDOW_SECONDS`, so that it shows the current speed."""
TENTHS = 10
"""If stderr is no terminal, one line is printed for each tenth."""


class TransferProgress(TransientLine):
    """Redraws one line on a terminal; otherwise prints a line now and then."""

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._on_terminal = stream.isatty()
        self._seen: deque[tuple[float, int]] = deque()
        self._painted_at = float("-inf")
        self._tenth = -1

    def update(self, done: int, total: int | None) -> None:
        """Report the bytes received and the total (None: unknown)."""
        now = self._clock()
        if self._seen and done < self._seen[-1][1]:
            self._seen.clear()  # another file, or a restart
            self._tenth = -1
        self._seen.append((now, done))
        while len(self._seen) > 2 and now - self._seen[0][0] > WINDOW_SECONDS:
            self._seen.popleft()
        whole = total is not None and done >= total
        if self._on_terminal:
            if now - self._painted_at >= REDRAW_SECONDS or whole:
                self._painted_at = now
                self._redraw(self._line(done, total))
        elif total and done * TENTHS // total > self._tenth:
            self._tenth = done * TENTHS // total
            self._write(f"{self._line(done, total)}\n")

    def checking(self, done: int, total: int) -> None:
        """Report the progress of hashing data from earlier runs."""
        now = self._clock()
        if self._on_terminal and now - self._painted_at >= REDRAW_SECONDS:
            self._painted_at = now
            self._redraw(f"checking {shown_bytes(done)}/{shown_bytes(total)} ({done / total:.0%})")

    def say(self, line: str) -> None:
        """Print a line that is not erased."""
        self.erase()
        self._write(f"edgeinfer: {line}\n")

    def erase(self) -> None:
        """Erase the line."""
        if self._on_terminal and self._painted_at > float("-inf"):
            control(self._stream, ERASE)
            self._stream.flush()
            self._painted_at = float("-inf")

    def _line(self, done: int, total: int | None) -> str:
        """For example: 1.2 GiB/4.7 GiB (26%), 11.3 MiB/s, 5 min left."""
        parts = [shown_bytes(done)]
        if total:
            parts = [f"{shown_bytes(done)}/{shown_bytes(total)} ({done / total:.0%})"]
        (then, before), (now, _) = self._seen[0], self._seen[-1]
        rate = (done - before) / (now - then) if now > then else 0.0
        if rate > 0:
            parts.append(f"{shown_bytes(rate)}/s")
            if total and done < total:
                parts.append(f"{shown_time((total - done) / rate)} left")
        return ", ".join(parts)

    def _redraw(self, line: str) -> None:
        control(self._stream, ERASE)
        self._write(line)

    def _write(self, text: str) -> None:
        self._stream.write(text)
        self._stream.flush()
