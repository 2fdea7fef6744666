"""State of a response, shared by the model thread (writer) and the screen (reader)."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from edgeinfer_tui.output.progress_line import shown_time

if TYPE_CHECKING:
    from edgeinfer.history.tree import Turn
    from edgeinfer.results import Generation


@dataclass
class Progress:
    """Progress of a long operation; written by one thread, read by another."""

    label: str
    shown: Callable[[int], str] = str
    done: int = 0
    total: int = 0
    since: float = field(default_factory=time.monotonic)

    def line(self) -> str:
        """For example: reading the prompt 512/2048 (25%), 3 s left."""
        if not self.total or self.done >= self.total:
            return f"{self.label} ..."
        seconds = (time.monotonic() - self.since) / self.done * (self.total - self.done) if self.done else 0.0
        left = f", {shown_time(seconds)} left" if seconds >= 1 else ""
        counted = f"{self.shown(self.done)}/{self.shown(self.total)} ({self.done / self.total:.0%})"
        return f"{self.label} {counted}{left}"


class RunningAnswer:
    """The screen's view of a response that the model thread generates; its text is that of `turn`."""

    def __init__(
        self, turn: "Turn", before: list[dict[str, str]], text: str, settings: dict[str, Any]
    ) -> None:
        """`turn`: message that receives the response; `before`: messages before `text`, the one to respond
        to."""
        self.turn, self.before, self.text, self.settings = turn, before, text, settings
        self.reading = Progress("reading the prompt")
        self.speaking = False
        """Whether the first token was generated."""
        self.latest: Generation | None = None
        """Latest statistics; final ones once the response has ended."""
        self.error: str | None = None
        self._stop = threading.Event()

    def stop(self) -> None:
        """Stop generating at the next token."""
        self._stop.set()

    @property
    def stopped(self) -> bool:
        return self._stop.is_set()
