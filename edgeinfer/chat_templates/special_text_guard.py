"""Prevents text in messages from becoming control tokens when the template is rendered."""

import re
import secrets
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from edgeinfer.chat_templates.reasoning import REASONING_MARKS
from edgeinfer.tokenizer.special_tokens import SpecialSplitter, SpecialToken

_INDEX_DIGITS = 6
_KEYWORD = re.compile(r"[\w-]+")
_KEYWORD_FIELDS = ("role", "type")


class SpecialTextGuard:
    """Replaces special-token texts in messages by placeholders that only `Placeholders` can resolve.

    A template sees `Hi 8201…000000` for a message `Hi <|end|>`. The tokenizer then splits the rendered text
    at the remaining special tokens, which are those of the template. After that, the placeholders between
    them are replaced by the original texts. `texts`: the special tokens' texts.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._splitter = SpecialSplitter([SpecialToken(0, text) for text in dict.fromkeys(texts) if text])

    def placeholders(self) -> "Placeholders":
        """Placeholders for one rendering, with a new random number."""
        return Placeholders(self)

    def present(self, text: str) -> list[str]:
        """The special tokens' texts that occur in `text`, longest first."""
        return [token.text for token in self._splitter.present(text)]

    @cached_property
    def _partial(self) -> tuple[frozenset[str], frozenset[str], int]:
        """All proper prefixes and suffixes of the texts, and the length of the longest."""
        texts = [token.text for token in self._splitter.tokens]
        starts = frozenset(text[:end] for text in texts for end in range(1, len(text)))
        ends = frozenset(text[start:] for text in texts for start in range(1, len(text)))
        return starts, ends, max((len(text) - 1 for text in texts), default=0)

    def cut_at_end(self, text: str) -> int:
        """Length of the longest suffix of `text` that is a prefix of a special token's text."""
        starts, _, longest = self._partial
        sizes = range(min(longest, len(text)), 0, -1)
        return next((size for size in sizes if text[-size:] in starts and not text[-size].isspace()), 0)

    def cut_at_start(self, text: str) -> int:
        """Length of the longest prefix of `text` that is a suffix of a special token's text."""
        _, ends, longest = self._partial
        sizes = range(min(longest, len(text)), 0, -1)
        return next((size for size in sizes if text[:size] in ends and not text[size - 1].isspace()), 0)


class Placeholders:
    """The placeholders of one rendering and their original texts."""

    def __init__(self, guard: SpecialTextGuard) -> None:
        self._guard = guard
        self._prefix = str(10**38 + secrets.randbelow(9 * 10**38))
        self._pattern = re.compile(f"{self._prefix}([0-9]{{{_INDEX_DIGITS}}})")
        self._hidden: list[str] = []
        self._numbers: dict[str, int] = {}

    def hide_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message without special-token texts; an assistant's reasoning marks are kept, because templates
        search for them.
        """
        kept = REASONING_MARKS if message.get("role") == "assistant" else frozenset()
        hidden: dict[str, Any] = self.hide(message, kept)
        return hidden

    def hide(self, value: Any, kept: frozenset[str] = frozenset()) -> Any:
        """A copy of JSON-like `value` whose strings contain no special-token text except those in `kept`."""
        if isinstance(value, str):
            return self._hide_text(value, kept)
        if isinstance(value, Mapping):
            return {
                self.hide(key, kept): each
                if key in _KEYWORD_FIELDS and isinstance(each, str) and _KEYWORD.fullmatch(each)
                else self.hide(each, kept)
                for key, each in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.hide(each, kept) for each in value]
        return value

    def restore(self, text: str) -> str:
        """A rendered text with the placeholders replaced by the original texts."""
        if not self._hidden:
            return text
        return self._pattern.sub(lambda found: self._hidden[int(found[1])], text)

    def _hide_text(self, text: str, kept: frozenset[str]) -> str:
        for special in self._guard.present(text):
            if special not in kept:
                text = text.replace(special, self._placeholder(special))
        if size := self._guard.cut_at_end(text):
            text = text[:-size] + self._placeholder(text[-size:])
        if size := self._guard.cut_at_start(text):
            text = self._placeholder(text[:size]) + text[size:]
        return text

    def _placeholder(self, text: str) -> str:
        if text not in self._numbers:
            self._numbers[text] = len(self._hidden)
            self._hidden.append(text)
        return f"{self._prefix}{self._numbers[text]:0{_INDEX_DIGITS}d}"
