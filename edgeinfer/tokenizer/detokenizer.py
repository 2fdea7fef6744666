"""Incremental detokenizer: never emits part of a character or the start of a possible stop string."""

import codecs
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from edgeinfer.results import Token

if TYPE_CHECKING:
    from edgeinfer.engine.protocols import TextDecoder


class StreamDecoder:
    """Holds back the bytes of a character until it is complete.

    Invalid bytes become U+FFFD as soon as they are known to be invalid. Leading spaces are kept: the tokens
    continue a text before them. `known`: the bytes that `token_bytes` has returned, by id.
    """

    def __init__(self, token_bytes: Callable[[int], bytes], known: dict[int, bytes] | None = None) -> None:
        self._token_bytes = token_bytes
        self._known = {} if known is None else known
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = b""

    def push(self, token_id: int) -> str:
        """Return the text that this token completes; may be empty."""
        piece = self._known.get(token_id)
        if piece is None:
            piece = self._known[token_id] = self._token_bytes(token_id)
        if not self._held and piece.isascii():
            return piece.decode("ascii")
        text = self._decoder.decode(piece)
        held = self._held = self._decoder.getstate()[0]
        if len(held) == 2 and held[0] == 0xED and held[1] >= 0xA0:
            # The first two bytes of a surrogate: Python waits for the third, which is always invalid in
            # UTF-8.
            self._reset()
            text += "\ufffd\ufffd"
        return text

    @property
    def pending(self) -> bool:
        """Whether bytes of an incomplete character are held back."""
        return bool(self._held)

    def finish(self) -> str:
        """Return the rest at the end of the tokens: U+FFFD for an incomplete character, else ""."""
        text = self._decoder.decode(b"", final=True)
        self._reset()
        return text

    def _reset(self) -> None:
        self._decoder.reset()
        self._held = b""


class Detokenizer:
    """Finds the text of tokens; buffers those whose text is incomplete (part of a character or stop
    string).
    """

    def __init__(self, decoder: "TextDecoder", stop: Sequence[str]) -> None:
        self._decoder = decoder
        self._stops = StopStrings(stop)
        self._pending: list[Token] = []

    @property
    def stopped(self) -> bool:
        return self._stops.found is not None

    def text_of(self, token_id: int) -> str:
        """The text that can be emitted after one more token."""
        return self._stops.push(self._decoder.push(token_id))

    def push(self, token: Token) -> list[Token]:
        """The tokens that can be emitted after this one, the last of `text_of`, which has its text."""
        self._pending.append(token)
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
