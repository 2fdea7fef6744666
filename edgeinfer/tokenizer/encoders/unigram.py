"""Unigram encoding (T5, XLM-RoBERTa): of all ways to split a text, the one with the highest sum of scores."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from edgeinfer.tokenizer.encoders.charsmap import Charsmap
from edgeinfer.tokenizer.encoders.piece_table import (
    SPACE,
    PieceTable,
    check_scores,
    plain_tokens,
    word_boundary,
)
from edgeinfer.tokenizer.encoders.word_cache import WordCache
from edgeinfer.tokenizer.vocabulary import TokenType, Vocabulary, flag

_UNKNOWN_PENALTY = np.float32(10)
_UNKNOWN = -1


class UnigramEncoder:
    """Encodes plain text to tokens and decodes tokens to bytes.

    Characters without a piece are unknown tokens, adjacent ones a single one: as in llama.cpp, tokens of type
    BYTE are decoded only. Source: Kudo 2018 (section 3.2, Viterbi); the code of SentencePiece and llama.cpp.
    llama.cpp leaves a text that begins like a user-defined token without normalization; this doesn't.
    """

    def __init__(self, vocabulary: Vocabulary, metadata: Mapping[str, Any]) -> None:
        check_scores(vocabulary)
        tokens = plain_tokens(vocabulary)
        scores, types = vocabulary.scores.tolist(), vocabulary.types.tolist()
        # The highest score for user-defined tokens, of which all others are logarithms of probabilities.
        self._pieces = PieceTable(
            {
                text: (token, 0.0 if types[token] == TokenType.USER_DEFINED else scores[token])
                for text, token in tokens.items()
            }
        )
        normal = vocabulary.scores[vocabulary.types == TokenType.NORMAL]
        lowest = normal.min() if normal.size else np.finfo(np.float32).max
        self._unknown_score = float(max(lowest - _UNKNOWN_PENALTY, np.finfo(np.float32).min))
        self._unknown = vocabulary.special.unk
        self._charsmap = Charsmap(metadata)
        self._adds_space = flag(metadata, "add_space_prefix", False)
        self._merges_spaces = flag(metadata, "remove_extra_whitespaces", False)
        self.begins_with_space = self._adds_space or self._merges_spaces
        """Whether a space is added before each text."""
        self._boundary = word_boundary(vocabulary.texts)
        self._ids_of = WordCache(self._best_ids)

    def encode(self, text: str) -> list[int]:
        """Return the tokens of `text`, which contains no special tokens."""
        ids: list[int] = []
        for word in self._boundary.split(self._normalized(text)):
            for token in self._ids_of[word]:
                if token != _UNKNOWN:
                    ids.append(token)
                elif self._unknown is not None and ids[-1:] != [self._unknown]:
                    ids.append(self._unknown)
        return ids

    def token_bytes(self, text: str) -> bytes:
        """Return the bytes of a normal token with this text."""
        return text.replace(SPACE, " ").encode("utf-8", "surrogateescape")

    def _normalized(self, text: str) -> str:
        """Return `text` after replacements, with `▁` for spaces and, if the file specifies it, before it."""
        text = self._charsmap.apply(text)
        if self._merges_spaces:
            return "".join(SPACE + word for word in text.split(" ") if word)
        words = text.lstrip(" ")
        if self._adds_space and words:
            text = f"{text[: len(text) - len(words)]} {words}"
        return text.replace(" ", SPACE)

    def _best_ids(self, word: str) -> list[int]:
        """Return the tokens with the highest sum of scores; `_UNKNOWN` for a character without a piece."""
        count = len(word)
        sums = [0.0, *[-math.inf] * count]
        best: list[tuple[int, int]] = [(0, _UNKNOWN)] * (count + 1)  # start and token of the piece that ends
        lengths, values = self._pieces.lengths, self._pieces.values
        for start in range(count):
            is_known = False
            for length in lengths(word, start):
                piece = values.get(word[start : start + length])
                if piece is None or start + length > count:
                    continue
                is_known |= length == 1
                if sums[start] + piece[1] > sums[start + length]:
                    sums[start + length] = sums[start] + piece[1]
                    best[start + length] = (start, piece[0])
            if not is_known and sums[start] + self._unknown_score > sums[start + 1]:
                sums[start + 1] = sums[start] + self._unknown_score
                best[start + 1] = (start, _UNKNOWN)
        ids: list[int] = []
        end = count
        while end > 0:
            end, token = best[end]
            ids.append(token)
        return ids[::-1]
