"""Notifications about responses whose context was too small: what was left out, and where one ended."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from edgeinfer_tui.output.status_line import dropped_messages_line, full_line

if TYPE_CHECKING:
    from edgeinfer.results import Generation


class ResponseReports:
    """Reports by `notify`, as that of a screen; each loss is reported once."""

    def __init__(self, notify: Callable[..., None]) -> None:
        self._notify = notify
        self._dropped = 0
        """Number of dropped messages when they were last reported."""
        self._evicted = 0
        """Number of evicted tokens when they were last reported."""

    def report_shifts(self, result: "Generation", context: int) -> None:
        """Report each context shift of a response so far."""
        if result.evicted_tokens > self._evicted:
            left_out = f"{result.evicted_tokens} after the first were evicted"
            text = f"the context of {context} tokens was shifted: {left_out}"
            self._notify(text, severity="warning", markup=False, timeout=10)
        self._evicted = result.evicted_tokens

    def report_end(self, result: "Generation", context: int) -> None:
        """Report what was left out of a finished response, and whether the context is full."""
        dropped = dropped_messages_line(result, context)
        if dropped and result.dropped_messages != self._dropped:
            self._notify(dropped, severity="warning", markup=False, timeout=10)
        self._dropped = result.dropped_messages
        self.report_shifts(result, context)
        if full := full_line(result, context):
            self._notify(full, severity="warning")
