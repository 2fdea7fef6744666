"""Byte-pair encoding: words to tokens by a ranked list of merges."""

from collections.abc import Sequence

from tokenizers.models import BPE

from edgeinfer.tokenizer.byte_alphabet import CHARACTER_OF_BYTE, spell, unspell
from edgeinfer.tokenizer.merging import merge
from edgeinfer.tokenizer.pre_tokenizers import PreTokenizer
from edgeinfer.tokenizer.splitting import Splitter
from edgeinfer.tokenizer.vocabulary import Vocabulary

_CACHED_WORDS = 100_000
_CACHED_LENGTH = 32
_SYMBOLS_BEFORE_RUST = 200_000
"""Building the Rust merger for a vocabulary of 150k tokens takes as long as merging this many symbols in
Python.
"""


class BytePairEncoder:
    """Encodes plain text to tokens and decodes tokens to bytes."""

    def __init__(self, vocabulary: Vocabulary, merges: Sequence[str], pre_tokenizer: PreTokenizer) -> None:
        self._vocabulary = vocabulary
        self._facts = pre_tokenizer
        self._splitter = Splitter(pre_tokenizer)
        # The first of two equal merges has priority, so the list is read from its end.
        self._ranks = dict(zip(reversed(merges), range(len(merges) - 1, -1, -1), strict=True))
        self._cache: dict[str, list[int]] = {}
        self._byte_ids = vocabulary.byte_ids()
        self._symbols_merged = 0
        self._rust: BPE | None = None
        self._rust_differs = False
        self._no_tokens: list[str] = []

    def encode(self, text: str) -> list[int]:
        """Return the tokens of `text`, which contains no special tokens."""
        if self._facts.escape_spaces:
            text = text.replace(" ", "▁")
        ids: list[int] = []
        cached = self._cache.get
        start = 0
        for end in self._splitter.cuts(text):
            word = text[start:end]
            start = end
            found = cached(word)
            ids += self._word_ids(word) if found is None else found
        return ids

    def token_bytes(self, text: str) -> bytes:
        """Return the bytes of a normal token with this text."""
        if self._facts.byte_level:
            return unspell(text)
        if self._facts.escape_spaces:
            text = text.replace("▁", " ")
        return text.encode("utf-8", "surrogateescape")

    def _word_ids(self, word: str) -> list[int]:
        ids = self._merged_ids(spell(word) if self._facts.byte_level else word)
        if len(word) <= _CACHED_LENGTH:
            if len(self._cache) >= _CACHED_WORDS:
                self._cache.clear()
            self._cache[word] = ids
        return ids

    def _merged_ids(self, spelled: str) -> list[int]:
        whole = self._facts.ignore_merges or (self._facts.newline_runs and not spelled.strip("\n"))
        if whole and spelled in self._vocabulary.ids:
            return [self._vocabulary.ids[spelled]]
        self._symbols_merged += len(spelled)
        if self._symbols_merged > _SYMBOLS_BEFORE_RUST and self._rust is None and not self._rust_differs:
            self._build_rust()
        if self._rust is not None:
            found = [token.id for token in self._rust.tokenize(spelled)]
            return found if not self._no_tokens else self._with_fallbacks(found)
        look_up = self._vocabulary.ids.get
        ids: list[int] = []
        for symbol in merge(spelled, self._ranks, " "):
            token = look_up(symbol)
            ids += self._symbol_ids(symbol) if token is None else [token]
        return ids

    def _with_fallbacks(self, ids: list[int]) -> list[int]:
        """Return `ids` with each symbol that is no token replaced by the tokens of its bytes."""
        size = len(self._vocabulary)
        spread = (
            [token] if token < size else self._symbol_ids(self._no_tokens[token - size]) for token in ids
        )
        return [token for tokens in spread for token in tokens]

    def _symbol_ids(self, symbol: str) -> list[int]:
        """Return the tokens of the bytes of a symbol that is no token; bytes without a token are omitted."""
        encoded = symbol.encode("utf-8", "surrogateescape")
        if not self._facts.byte_level:
            return [found for byte in encoded if (found := self._byte_ids[byte]) is not None]
        texts = (bytes([byte]).decode("utf-8", "surrogateescape") for byte in encoded)
        return [self._vocabulary.ids[text] for text in texts if text in self._vocabulary.ids]

    def _build_rust(self) -> None:
        """Build the merger of the `tokenizers` library, if it can give the same results.

        It requires that every symbol is a token: other symbols get ids after the vocabulary.
        """
        ids = self._vocabulary.ids
        ranked = (pair.partition(" ") for pair in sorted(self._ranks, key=self._ranks.__getitem__))
        pairs = [(left, right) for left, _, right in ranked if " " not in right]
        symbols = {left + right for left, right in pairs}.union(*pairs) - ids.keys()
        if self._facts.byte_level:
            symbols |= set(CHARACTER_OF_BYTE.values()) - ids.keys()
        bytes_complete = self._facts.byte_level or all(f"<0x{byte:02X}>" in ids for byte in range(256))
        if not bytes_complete or _has_surrogates("".join(ids)):
            self._rust_differs = True
            return
        self._no_tokens = sorted(symbols)
        extra = {symbol: len(self._vocabulary) + index for index, symbol in enumerate(self._no_tokens)}
        self._rust = BPE(ids | extra, pairs, byte_fallback=not self._facts.byte_level)


def _has_surrogates(text: str) -> bool:
    """Return whether a text holds bytes that are not UTF-8, as the file's reader keeps them."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return True
    return False
