"""Pieces of text with a value each, looked up at a position of a text."""

import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Generic, TypeVar

import numpy as np

from edgeinfer.tokenizer.vocabulary import TokenType, Vocabulary
from edgeinfer_quant_formats.errors import FormatError

SPACE = "▁"
MAX_PIECE_LENGTH = 512
"""Characters of a piece. Encoding takes time in proportion to it, and no tokenizer has longer ones."""

Value = TypeVar("Value")

_PREFIX_LENGTH = 2
_NO_LENGTHS: tuple[int, ...] = ()
_PLAIN_TYPES = (TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.UNUSED)


class PieceTable(Generic[Value]):
    """Values by piece; `lengths` gives the lengths that a piece at a position may have."""

    def __init__(self, values: Mapping[str, Value]) -> None:
        self.values = dict(values)
        found: dict[str, set[int]] = {}
        for piece in self.values:
            found.setdefault(piece[:_PREFIX_LENGTH], set()).add(len(piece))
        for prefix, lengths in found.items():
            if prefix[0] in self.values:
                lengths.add(1)
        self._lengths = {prefix: tuple(sorted(found[prefix], reverse=True)) for prefix in found}

    def lengths(self, text: str, position: int) -> tuple[int, ...]:
        """Return the possible lengths of a piece at `position`, longest first; some exceed the text."""
        lengths = self._lengths.get(text[position : position + _PREFIX_LENGTH])
        return self._lengths.get(text[position], _NO_LENGTHS) if lengths is None else lengths

    def longest(self, text: str, position: int) -> str | None:
        """Return the longest piece at `position`, or None."""
        for length in self.lengths(text, position):
            piece = text[position : position + length]
            if piece in self.values:
                return piece
        return None


def plain_tokens(vocabulary: Vocabulary) -> dict[str, int]:
    """Return the ids, by text, of the tokens that plain text may become: no control, unknown or byte tokens.

    Raises:
        FormatError: a text has more than `MAX_PIECE_LENGTH` characters.
    """
    tokens = {vocabulary.texts[token]: token for token in vocabulary.of_types(*_PLAIN_TYPES)}
    longest = max(tokens, key=len, default="")
    if len(longest) > MAX_PIECE_LENGTH:
        raise FormatError(
            f"tokenizer.ggml.tokens: token {tokens[longest]} has {len(longest)} characters, wanted at most "
            f"{MAX_PIECE_LENGTH}"
        )
    return tokens


def check_scores(vocabulary: Vocabulary) -> None:
    """Raise `FormatError` if the score of a token is not finite."""
    wrong = np.flatnonzero(~np.isfinite(vocabulary.scores))
    if wrong.size:
        raise FormatError(
            f"tokenizer.ggml.scores: token {wrong[0]} has the score {vocabulary.scores[wrong[0]]}, wanted a "
            "finite number"
        )


def word_boundary(texts: Iterable[str]) -> re.Pattern[str]:
    """Return where a text may be split with the same tokens for its parts: where no token crosses.

    That is before a space, unless some token contains the character before the space together with it.
    """
    inner = (text for text in texts if SPACE in text[1:])
    joined = {before for text in inner for before, after in pairwise(text) if after == SPACE}
    uncut = "".join(re.escape(character) for character in sorted(joined | {SPACE}))
    return re.compile(f"(?<=[^{uncut}])(?={SPACE})")
