"""One progress line for a job of several labelled steps."""

import sys
from collections.abc import Callable
from typing import Any

from edgeinfer_tui.output.columns import shown_bytes
from edgeinfer_tui.output.progress_line import BUILDING, ProgressLine, TransientLine


class LabelledProgress(TransientLine):
    """Shows the step that reported last, and its remaining time if `time_left`."""

    def __init__(self, time_left: bool = False) -> None:
        self._time_left = time_left
        self._line: ProgressLine | None = None
        self._label = ""

    def update(self, label: str, done: int, total: int, shown: Callable[[int], str] = str) -> None:
        """Report the progress of a step."""
        if self._line is None or label != self._label:
            self.erase()
            self._label = label
            at_once = label == BUILDING
            self._line = ProgressLine(
                label, sys.stderr, shown=shown, time_left=self._time_left, at_once=at_once
            )
        self._line.update(done, total)

    def step(self, label: str, shown: Callable[[int], str] = str) -> Callable[[int, int], None]:
        """The progress callback of one step."""
        return lambda done, total: self.update(label, done, total, shown)

    def loading(self) -> dict[str, Any]:
        """The progress callbacks of `edgeinfer.load`."""
        return {
            "progress": self.step("loading the model", shown_bytes),
            "build_progress": self.step(BUILDING),
        }

    def erase(self) -> None:
        """Erase the line."""
        if self._line is not None:
            self._line.erase()
