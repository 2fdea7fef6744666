"""Decodes tokens one at a time to complete characters."""

import codecs
from collections.abc import Callable


class StreamDecoder:
    """Holds back the bytes of a character until it is complete.

    Invalid bytes become U+FFFD as soon as they are known to be invalid. Leading spaces are kept: the tokens
    continue a text before them.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = b""

    def push(self, token_id: int) -> str:
        """Return the text that this token completes; may be empty."""
        piece = self._token_bytes(token_id)
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
