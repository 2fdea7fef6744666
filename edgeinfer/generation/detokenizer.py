"""Incremental detokenizer: never emits part of a character or the start of a possible stop string."""

from collections.abc import Sequence
from dataclasses import replace

from edgeinfer.engine.protocols import TextTokenizer
from edgeinfer.results import Token


class Detokenizer:
    """Adds text to tokens; buffers those whose text is incomplete (part of a character or stop string)."""

    def __init__(self, tokenizer: TextTokenizer, stop: Sequence[str]) -> None:
        self._decoder = tokenizer.stream_decoder()
        self._stops = StopStrings(stop)
        self._pending: list[Token] = []

    @property
    def stopped(self) -> bool:
        return self._stops.found is not None

    def push(self, token: Token) -> list[Token]:
        """The tokens that can be emitted now, with their text."""
        shown = self._stops.push(self._decoder.push(token.id))
        # `dataclasses.replace` would take three times as long, on the path between two steps.
        self._pending.append(Token(token.id, shown, token.drafted, token.logprob, token.top_logprobs))
        complete = self.stopped or not (self._stops.holds or self._decoder.pending)
        return self._release() if complete else []

    def finish(self) -> list[Token]:
        """The buffered tokens, at the end of generation."""
        if not self.stopped:
            text = self._stops.push(self._decoder.finish()) + self._stops.finish()
            if text:
                self._pending[-1] = replace(self._pending[-1], text=self._pending[-1].text + text)
        return self._release()

    def _release(self) -> list[Token]:
        released, self._pending = self._pending, []
        return released


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
