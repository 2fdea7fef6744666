"""Stop strings: end a completion at a text, without emitting any part of it."""

from collections.abc import Sequence


class StopStrings:
    """Passes text through, except a suffix that may be the start of a stop string."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.found: str | None = None

    def push(self, text: str) -> str:
        """Add new text; return the text that can be emitted. Sets `found` when a stop string is complete."""
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
        """Length of the longest suffix of the buffered text that is a prefix of `stop`."""
        longest = min(len(stop) - 1, len(self._held))
        return next((n for n in range(longest, 0, -1) if self._held.endswith(stop[:n])), 0)

    @property
    def holds(self) -> bool:
        """Whether text is buffered."""
        return bool(self._held)

    def finish(self) -> str:
        """The buffered text, which is no stop string."""
        shown, self._held = self._held, ""
        return shown
