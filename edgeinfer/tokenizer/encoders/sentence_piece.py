"""SentencePiece encoding: symbols are merged by the score of the resulting piece."""

from edgeinfer.tokenizer.encoders.merging import merge
from edgeinfer.tokenizer.encoders.piece_table import SPACE, word_boundary
from edgeinfer.tokenizer.encoders.word_cache import WordCache
from edgeinfer.tokenizer.vocabulary import Vocabulary


class SentencePieceEncoder:
    """Encodes plain text to tokens and decodes tokens to bytes.

    The file's `remove_extra_whitespaces` and its normalization table are not applied: the models that use
    this tokenizer keep every space, and llama.cpp, with which their files are tested, ignores both.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._priorities = dict(zip(vocabulary.texts, (-vocabulary.scores).tolist(), strict=True))
        self._byte_ids = vocabulary.byte_ids()
        self._boundary = word_boundary(vocabulary.texts)
        self._ids_of = WordCache(self._piece_ids)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of `text`, which contains no special tokens."""
        ids: list[int] = []
        ids_of = self._ids_of
        for piece in self._boundary.split(text.replace(" ", SPACE)):
            ids += ids_of[piece]
        return ids

    def token_bytes(self, text: str) -> bytes:
        """Return the bytes of a normal token with this text."""
        return text.replace(SPACE, " ").encode("utf-8", "surrogateescape")

    def _piece_ids(self, piece: str) -> list[int]:
        ids: list[int] = []
        for symbol in merge(piece, self._priorities, ""):
            token_id = self._vocabulary.ids.get(symbol)
            ids += self._fallback_ids(symbol) if token_id is None else [token_id]
        return ids

    def _fallback_ids(self, symbol: str) -> list[int]:
        """Return a token for each UTF-8 byte; for a byte without one the unknown token, if it exists."""
        unknown = self._vocabulary.special.unk
        ids_of_bytes = (self._byte_ids[byte] for byte in symbol.encode("utf-8"))
        ids = (unknown if token is None else token for token in ids_of_bytes)
        return [token for token in ids if token is not None]
