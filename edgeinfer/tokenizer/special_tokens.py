"""Special tokens: which ones a file has, and where a text contains them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edgeinfer.tokenizer.vocabulary import TokenType, Vocabulary

_ASCII_WHITESPACE = " \t\n\v\f\r"
_KEY_LENGTH = 3
_JINA_PRE_TOKENIZERS = ("jina-v2-de", "jina-v2-es", "jina-v2-code")
_MASK_ARCHITECTURES = ("nomic-bert-moe", "jina-bert-v3")
_PHI3_KEEPS_SPACE = frozenset({"<unk>", "<s>", "<|endoftext|>"})

Fragment = str | int
"""A piece of plain text, or the id of a special token."""


@dataclass(frozen=True)
class SpecialToken:
    """A token that is recognized in text before tokenization."""

    token_id: int
    text: str
    absorbs_space_before: bool = False
    absorbs_space_after: bool = False


@dataclass
class SpecialSplitter:
    """Splits a text at special tokens: longest texts first. Source: llama.cpp."""

    tokens: Sequence[SpecialToken]
    _groups: dict[str, list[tuple[int, SpecialToken]]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        # The sort is stable, so texts of equal length keep the order of their ids.
        longest_first = sorted(self.tokens, key=lambda token: -len(token.text.encode("utf-8", "replace")))
        for order, token in enumerate(longest_first):
            self._groups.setdefault(token.text[:_KEY_LENGTH], []).append((order, token))

    def split(self, text: str) -> list[Fragment]:
        """Return the text's fragments in order; none is empty."""
        fragments: list[Fragment] = [text] if text else []
        for token in self.present(text):
            fragments = [
                part
                for fragment in fragments
                for part in (_cut(fragment, token) if isinstance(fragment, str) else [fragment])
            ]
        return fragments

    def present(self, text: str) -> list[SpecialToken]:
        """Return the tokens whose texts occur, longest first; most groups are excluded by their common
        prefix.
        """
        groups = (group for key, group in self._groups.items() if key in text)
        entries = [entry for group in groups for entry in group if entry[1].text in text]
        return [token for _, token in sorted(entries, key=lambda entry: entry[0])]


def _cut(text: str, token: SpecialToken) -> list[Fragment]:
    """Return `text` split at each occurrence of one token."""
    parts: list[Fragment] = []
    pieces = text.split(token.text)
    for index, piece in enumerate(pieces):
        if index > 0:
            parts.append(token.token_id)
            if token.absorbs_space_after:
                piece = piece.lstrip(_ASCII_WHITESPACE)
        if index < len(pieces) - 1 and token.absorbs_space_before:
            piece = piece.rstrip(_ASCII_WHITESPACE)
        if piece:
            parts.append(piece)
    return parts


def special_tokens(vocabulary: Vocabulary, metadata: Mapping[str, Any]) -> list[SpecialToken]:
    """Return the control, unknown and user-defined tokens of a file.

    GGUF doesn't mark tokens that absorb adjacent spaces, so they are selected by the model's name. Source:
    llama.cpp, `llama-vocab.cpp`.
    """
    absorbs_before, all_absorb_after = _space_absorbers(metadata)
    return [
        SpecialToken(
            token_id,
            text := vocabulary.texts[token_id],
            absorbs_space_before=text == absorbs_before,
            absorbs_space_after=all_absorb_after and text not in _PHI3_KEEPS_SPACE,
        )
        for token_id in vocabulary.of_types(TokenType.CONTROL, TokenType.USER_DEFINED, TokenType.UNKNOWN)
    ]


def _space_absorbers(metadata: Mapping[str, Any]) -> tuple[str | None, bool]:
    """Return the text of the token that absorbs the space before it, and whether all absorb the space
    after.
    """
    name = str(metadata.get("general.name", "")).lower()
    architecture = str(metadata.get("general.architecture", ""))
    pre_tokenizer = str(metadata.get("tokenizer.ggml.pre", ""))
    if any(known in pre_tokenizer for known in _JINA_PRE_TOKENIZERS) or any(
        known in architecture for known in _MASK_ARCHITECTURES
    ):
        return "<mask>", False
    if "phi-3" in name or "phi3" in name:
        return None, True
    return ("[MASK]" if "modern-bert" in name else None), False
