"""Turns tokens into text one at a time, never half a character."""

import codecs
from collections.abc import Callable


class StreamDecoder:
    """Holds back the bytes of a character until it is whole.

    Bytes that can't become a character are U+FFFD as soon as that is certain. Nothing is stripped: what
    the tokens say goes on from a text that stands before them.
    """

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = b""

    def push(self, token_id: int) -> str:
        """Return the text that this token completes, maybe none."""
        piece = self._token_bytes(token_id)
        if not self._held and piece.isascii():
            return piece.decode("ascii")
        text = self._decoder.decode(piece)
        held = self._held = self._decoder.getstate()[0]
        if len(held) == 2 and held[0] == 0xED and held[1] >= 0xA0:
            # The first two bytes of a surrogate: Python waits for the third, which UTF-8 can't allow.
            self._reset()
            text += "\ufffd\ufffd"
        return text

    @property
    def pending(self) -> bool:
        """Whether half a character is being held."""
        return bool(self._held)

    def finish(self) -> str:
        """Return what is left when no token follows: U+FFFD for half a character, else nothing."""
        text = self._decoder.decode(b"", final=True)
        self._reset()
        return text

    def _reset(self) -> None:
        self._decoder.reset()
        self._held = b""
