"""The tokenizer of RWKV: the longest token that the text continues with, byte by byte."""

import re

from edgeinfer.tokenizer.vocabulary import TokenType, Vocabulary

_ESCAPES = re.compile(rb"\\(?:x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_CONTROLS = {b"t": b"\t", b"n": b"\n", b"r": b"\r"}
PREFIX_BYTES = 2
"""Bytes of a token's beginning by which the possible lengths are looked up."""


class LongestMatchEncoder:
    """Encodes text by greedy longest match; texts of tokens are bytes with escapes, as Python writes them."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._unknown = vocabulary.special.unk
        self._ids: dict[bytes, int] = {}
        lengths: dict[bytes, set[int]] = {}
        types = vocabulary.types.tolist()
        for token_id, text in enumerate(vocabulary.texts):
            data = self.token_bytes(text)
            if types[token_id] == TokenType.NORMAL and data:
                self._ids[data] = token_id
                lengths.setdefault(data[:PREFIX_BYTES], set()).add(len(data))
        self._lengths = {prefix: sorted(found, reverse=True) for prefix, found in lengths.items()}
        """Beginning of tokens -> their lengths, longest first."""

    def encode(self, text: str) -> list[int]:
        """The tokens of `text`; a byte without a token becomes the unknown token, or nothing without one."""
        data, position = text.encode("utf-8"), 0
        ids: list[int] = []
        while position < len(data):
            token_id, length = self._match(data, position)
            if token_id is not None:
                ids.append(token_id)
            position += length
        return ids

    def _match(self, data: bytes, position: int) -> tuple[int | None, int]:
        """The longest token at a position, and its length."""
        for prefix_bytes in range(PREFIX_BYTES, 0, -1):
            prefix = data[position : position + prefix_bytes]
            for length in self._lengths.get(prefix, ()) if len(prefix) == prefix_bytes else ():
                token_id = self._ids.get(data[position : position + length])
                if token_id is not None:
                    return token_id, length
        return self._unknown, 1

    @staticmethod
    def token_bytes(text: str) -> bytes:
        """The bytes of a token's text, without escapes."""
        return _ESCAPES.sub(_unescaped, text.encode("utf-8", "surrogateescape"))


def _unescaped(match: re.Match[bytes]) -> bytes:
    if match[1] is not None:
        return bytes.fromhex(match[1].decode())
    return _CONTROLS.get(match[2], match[2])
