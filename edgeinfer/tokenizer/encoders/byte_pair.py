"""Byte-pair encoding: words to tokens by a ranked list of merges."""

from collections.abc import Sequence

from edgeinfer.tokenizer.encoders.merging import merge
from edgeinfer.tokenizer.encoders.word_cache import WordCache
from edgeinfer.tokenizer.pre_tokenizers import PreTokenizer
from edgeinfer.tokenizer.splitting import NOT_WHITESPACE, Splitter
from edgeinfer.tokenizer.unicode_classes import LowercaseTable
from edgeinfer.tokenizer.vocabulary import Vocabulary

_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_HIDDEN = tuple(byte for byte in range(256) if byte not in _PRINTABLE)
CHARACTER_OF_BYTE = {byte: chr(byte) for byte in _PRINTABLE} | {
    byte: chr(256 + index) for index, byte in enumerate(_HIDDEN)
}
"""GPT-2's alphabet: a printable character for every byte, so that token texts are readable Unicode.
Source: Radford et al. 2019, `bytes_to_unicode` of the GPT-2 code."""
_BYTE_OF_CHARACTER = {ord(character): byte for byte, character in CHARACTER_OF_BYTE.items()}


class BytePairEncoder:
    """Encodes plain text to tokens and decodes tokens to bytes."""

    def __init__(self, vocabulary: Vocabulary, merges: Sequence[str], pre_tokenizer: PreTokenizer) -> None:
        self._vocabulary = vocabulary
        self._pre_tokenizer = pre_tokenizer
        self._splitter = Splitter(pre_tokenizer)
        # The first of two equal merges has priority, so the list is read from its end.
        self._ranks = dict(zip(reversed(merges), range(len(merges) - 1, -1, -1), strict=True))
        self._lowercase = LowercaseTable()
        self._ids_of = WordCache(self._word_ids)
        self._byte_ids = vocabulary.byte_ids()

    def encode(self, text: str) -> list[int]:
        """Return the tokens of `text`, which contains no special tokens."""
        if self._pre_tokenizer.drops_whitespace:
            return self._ids_without_whitespace(text)
        if self._pre_tokenizer.escape_spaces:
            text = text.replace(" ", "▁")
        ids: list[int] = []
        ids_of, start = self._ids_of, 0
        for end in self._splitter.cuts(text):
            ids += ids_of[text[start:end]]
            start = end
        return ids

    def _ids_without_whitespace(self, text: str) -> list[int]:
        if self._pre_tokenizer.lowercase:
            text = text.translate(self._lowercase)
        words = NOT_WHITESPACE.findall(text)
        return [token for word in words for token in self._ids_of[word]]

    def token_bytes(self, text: str) -> bytes:
        """Return the bytes of a normal token with this text."""
        if self._pre_tokenizer.byte_level:
            return from_byte_alphabet(text)
        if self._pre_tokenizer.escape_spaces:
            text = text.replace("▁", " ")
        return text.encode("utf-8", "surrogateescape")

    def _word_ids(self, word: str) -> list[int]:
        return self._merged_ids(to_byte_alphabet(word) if self._pre_tokenizer.byte_level else word)

    def _merged_ids(self, spelled: str) -> list[int]:
        whole = self._pre_tokenizer.ignore_merges or (
            self._pre_tokenizer.newline_runs and not spelled.strip("\n")
        )
        if whole and spelled in self._vocabulary.ids:
            return [self._vocabulary.ids[spelled]]
        look_up = self._vocabulary.ids.get
        ids: list[int] = []
        for symbol in merge(spelled, self._ranks, " "):
            token = look_up(symbol)
            ids += self._symbol_ids(symbol) if token is None else [token]
        return ids

    def _symbol_ids(self, symbol: str) -> list[int]:
        """Return the tokens of the bytes of a symbol that is no token; bytes without a token are omitted."""
        encoded = symbol.encode("utf-8", "surrogateescape")
        if not self._pre_tokenizer.byte_level:
            return [token_id for byte in encoded if (token_id := self._byte_ids[byte]) is not None]
        texts = (bytes([byte]).decode("utf-8", "surrogateescape") for byte in encoded)
        return [self._vocabulary.ids[text] for text in texts if text in self._vocabulary.ids]


def to_byte_alphabet(text: str) -> str:
    """Return the UTF-8 bytes of `text` in the alphabet, one character each."""
    return text.encode("utf-8").decode("latin-1").translate(CHARACTER_OF_BYTE)


def from_byte_alphabet(spelled: str) -> bytes:
    """Return the bytes of `spelled`; a character outside the alphabet gives its UTF-8 bytes."""
    try:
        return spelled.translate(_BYTE_OF_CHARACTER).encode("latin-1")
    except UnicodeEncodeError:
        pieces = (
            bytes([_BYTE_OF_CHARACTER[ord(character)]])
            if ord(character) in _BYTE_OF_CHARACTER
            else character.encode("utf-8", "surrogateescape")
            for character in spelled
        )
        return b"".join(pieces)
