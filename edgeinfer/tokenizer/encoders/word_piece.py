"""WordPiece encoding (BERT): normalized words, each the longest pieces from left to right."""

import unicodedata
from collections.abc import Mapping
from typing import Any

from edgeinfer.tokenizer.encoders.piece_table import SPACE, PieceTable, plain_tokens
from edgeinfer.tokenizer.encoders.word_cache import WordCache
from edgeinfer.tokenizer.unicode_classes import (
    MARK,
    PUNCTUATION,
    class_table,
    is_assigned,
    is_control,
    is_whitespace,
    lowercased,
)
from edgeinfer.tokenizer.vocabulary import Vocabulary, flag

_ASCII_SYMBOLS = frozenset("$+<=>^`|~")
_ASCII_PUNCTUATION = frozenset("!\"#%&'()*,-./:;?@[\\]_{}")
_CHINESE = (
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B920, 0x2CEAF),  # BERT's own range begins at 2B820; llama.cpp and the tokenizers library differ
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)


class WordPieceEncoder:
    """Encodes plain text to tokens and decodes tokens to bytes.

    GGUF files store a piece at the beginning of a word as `▁piece` and `##piece` as `piece`. A word that
    isn't covered by pieces is one unknown token. Source: Devlin et al. 2019; llama.cpp, whose normalization
    is followed: of a composed character only the first character of its decomposition remains.
    """

    def __init__(self, vocabulary: Vocabulary, metadata: Mapping[str, Any]) -> None:
        lowercase = flag(metadata, "normalizer.lowercase", True)
        strips_accents = flag(metadata, "normalizer.strip_accents", lowercase)
        self._normalized = _Normalization(lowercase, strips_accents)
        self._pieces = PieceTable(plain_tokens(vocabulary))
        self._unknown = vocabulary.special.unk
        self._ids_of = WordCache(self._word_ids)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of `text`, which contains no special tokens."""
        ids: list[int] = []
        for word in filter(None, text.translate(self._normalized).split(" ")):
            ids += self._ids_of[word]
        return ids

    def token_bytes(self, text: str) -> bytes:
        """Return the bytes of a normal token with this text."""
        return text.replace(SPACE, " ").encode("utf-8", "surrogateescape")

    def _word_ids(self, word: str) -> list[int]:
        return self._greedy_ids(SPACE + word)

    def _greedy_ids(self, spelled: str) -> list[int]:
        ids: list[int] = []
        position = 0
        while position < len(spelled):
            piece = self._pieces.longest(spelled, position)
            if piece is None:
                return [] if self._unknown is None else [self._unknown]
            ids.append(self._pieces.values[piece])
            position += len(piece)
        return ids


class _Normalization(dict[int, str]):
    """What each code point becomes, for `str.translate`; spaces separate words. Entries are made on use."""

    def __init__(self, lowercase: bool, strips_accents: bool) -> None:
        super().__init__()
        self._lowercase = lowercase
        self._strips_accents = strips_accents

    def __missing__(self, code: int) -> str:
        text = self[code] = self._made(chr(code))
        return text

    def _made(self, character: str) -> str:
        if self._strips_accents and is_assigned(character):
            character = unicodedata.normalize("NFD", character)[0]
        code = ord(character)
        kind = int(class_table()[code])
        if is_whitespace(code):
            return " "
        if is_control(code) or code == 0xFFFD or (self._strips_accents and kind == MARK):
            return ""
        text = lowercased(character) if self._lowercase else character
        separate = kind == PUNCTUATION or character in _ASCII_PUNCTUATION or character in _ASCII_SYMBOLS
        chinese = any(first <= code <= last for first, last in _CHINESE)
        return f" {text} " if separate or chinese else text
