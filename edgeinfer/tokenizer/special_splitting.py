"""Finds special tokens by their text."""

from collections.abc import Sequence
from dataclasses import dataclass, field

_ASCII_WHITESPACE = " \t\n\v\f\r"
_KEY_LENGTH = 3

Fragment = str | int
"""A piece of plain text, or the id of a special token."""


@dataclass(frozen=True)
class SpecialToken:
    """A token that is recognized in text before tokenization."""

    token_id: int
    text: str
    takes_space_before: bool = False
    takes_space_behind: bool = False


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
        found = [entry for group in groups for entry in group if entry[1].text in text]
        return [token for _, token in sorted(found, key=lambda entry: entry[0])]


def _cut(text: str, token: SpecialToken) -> list[Fragment]:
    """Return `text` split at each occurrence of one token."""
    parts: list[Fragment] = []
    stretches = text.split(token.text)
    for index, stretch in enumerate(stretches):
        if index > 0:
            parts.append(token.token_id)
            if token.takes_space_behind:
                stretch = stretch.lstrip(_ASCII_WHITESPACE)
        if index < len(stretches) - 1 and token.takes_space_before:
            stretch = stretch.rstrip(_ASCII_WHITESPACE)
        if stretch:
            parts.append(stretch)
    return parts
