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
_SYMBOLS_BEFORE_RUST = 20_000
"""Building the Rust merger of a 150k vocabulary takes as long as merging some 200,000 symbols without it."""


class BytePairEncoder:
    """Turns plain text into tokens and tokens into bytes."""

    def __init__(self, vocabulary: Vocabulary, merges: Sequence[str], pre_tokenizer: PreTokenizer) -> None:
        self._vocabulary = vocabulary
        self._facts = pre_tokenizer
        self._splitter = Splitter(pre_tokenizer)
        # The first of two equal merges counts, so the list is read from its end.
        self._ranks = dict(zip(reversed(merges), range(len(merges) - 1, -1, -1), strict=True))
        self._cache: dict[str, list[int]] = {}
        self._byte_ids = vocabulary.byte_ids()
        self._symbols_merged = 0
        self._rust: BPE | None = None
        self._rust_differs = False

    def encode(self, text: str) -> list[int]:
        """Return the tokens of `text`, which holds no special tokens."""
        if self._facts.escape_spaces:
            text = text.replace(" ", "▁")
        ids: list[int] = []
        cached = self._cache.get
        for word in self._splitter.words(text):
            found = cached(word)
            ids += self._word_ids(word) if found is None else found
        return ids

    def token_bytes(self, text: str) -> bytes:
        """Return the bytes that a normal token of this text stands for."""
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
            return [token.id for token in self._rust.tokenize(spelled)]
        ids: list[int] = []
        for symbol in merge(spelled, self._ranks, " "):
            found = self._vocabulary.ids.get(symbol)
            ids += self._symbol_ids(symbol) if found is None else [found]
        return ids

    def _symbol_ids(self, symbol: str) -> list[int]:
        """Return the tokens of the bytes of a symbol that is no token; bytes without a token are left out."""
        encoded = symbol.encode("utf-8", "surrogateescape")
        if not self._facts.byte_level:
            return [found for byte in encoded if (found := self._byte_ids[byte]) is not None]
        texts = (bytes([byte]).decode("utf-8", "surrogateescape") for byte in encoded)
        return [self._vocabulary.ids[text] for text in texts if text in self._vocabulary.ids]

    def _build_rust(self) -> None:
        """Build the merger of the `tokenizers` library if nothing is missing that it needs to agree."""
        ids = self._vocabulary.ids
        pairs = [tuple(pair.split(" ")) for pair in sorted(self._ranks, key=self._ranks.__getitem__)]
        complete = all(len(pair) == 2 and {*pair, pair[0] + pair[1]} <= ids.keys() for pair in pairs)
        if self._facts.byte_level:
            complete = complete and ids.keys() >= set(CHARACTER_OF_BYTE.values())
        else:
            complete = complete and all(f"<0x{byte:02X}>" in ids for byte in range(256))
        if not complete or any("\ud800" <= max(text) <= "\udfff" for text in ids):
            self._rust_differs = True
            return
        self._rust = BPE(ids, pairs, byte_fallback=not self._facts.byte_level)  # type: ignore[arg-type]
