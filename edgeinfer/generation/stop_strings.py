"""Ending an answer at a text, without ever showing a part of it."""

from collections.abc import Sequence


class StopStrings:
    """Lets text through as it comes, except what may be the beginning of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Take new text; return what is certain to be shown. Sets `found` when a stop string is complete."""
        if not self._stops:
            return text
        self._held += text
        hits = [(self._held.index(stop), stop) for stop in self._stops if stop in self._held]
        if hits:
            at, self.found = min(hits)
            shown, self._held = self._held[:at], ""
            return shown
        keep = max((self._overlap(stop) for stop in self._stops), default=0)
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(shown) :]
        return shown

    def _overlap(self, stop: str) -> int:
        """The longest end of the held text that begins `stop`."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)

    @property
    def holds(self) -> bool:
        """Whether text is being held back."""
        return bool(self._held)

    def finish(self) -> str:
        """What was held back and turned out to be no stop string."""
        shown, self._held = self._held, ""
        return shown
