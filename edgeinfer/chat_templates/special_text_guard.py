"""Keeps the text of a chat's messages from becoming control tokens when its template is rendered."""

import re
import secrets
from collections.abc import Iterable, Mapping
from functools import cached_property
from typing import Any

from edgeinfer.chat_templates.reasoning import REASONING_MARKS
from edgeinfer.tokenizer.special_splitting import SpecialSplitter, SpecialToken

_INDEX_DIGITS = 6
_KEYWORD = re.compile(r"[\w-]+")
_KEYWORD_FIELDS = ("role", "type")


class SpecialTextGuard:
    """Replaces special-token texts in messages by placeholders that only `Placeholders` can read.

    A template sees `Hi 8201…000000` where a message has `Hi <|end|>`. The tokenizer then splits the rendered
    text at the special tokens that are left, those of the template itself, and puts the messages' own texts
    back into what lies between them. `texts`: the special tokens' texts.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._splitter = SpecialSplitter([SpecialToken(0, text) for text in dict.fromkeys(texts) if text])

    def placeholders(self) -> "Placeholders":
        """Placeholders for one rendering, with a random number of their own."""
        return Placeholders(self)

    def present(self, text: str) -> list[str]:
        """The special tokens' texts that occur in `text`, longest first."""
        return [token.text for token in self._splitter.present(text)]

    @cached_property
    def _partial(self) -> tuple[frozenset[str], frozenset[str], int]:
        """The beginnings and the ends of all texts, and the length of the longest of these."""
        texts = [token.text for token in self._splitter.tokens]
        starts = frozenset(text[:end] for text in texts for end in range(1, len(text)))
        ends = frozenset(text[start:] for text in texts for start in range(1, len(text)))
        return starts, ends, max((len(text) - 1 for text in texts), default=0)

    def cut_at_end(self, text: str) -> int:
        """Length of the longest end of `text` with which a special token's text begins."""
        starts, _, longest = self._partial
        sizes = range(min(longest, len(text)), 0, -1)
        return next((size for size in sizes if text[-size:] in starts and not text[-size].isspace()), 0)

    def cut_at_start(self, text: str) -> int:
        """Length of the longest beginning of `text` with which a special token's text ends."""
        _, ends, longest = self._partial
        sizes = range(min(longest, len(text)), 0, -1)
        return next((size for size in sizes if text[:size] in ends and not text[size - 1].isspace()), 0)


class Placeholders:
    """The placeholders of one rendering, and what each stands for."""

    def __init__(self, guard: SpecialTextGuard) -> None:
        self._guard = guard
        self._prefix = str(10**38 + secrets.randbelow(9 * 10**38))
        self._pattern = re.compile(f"{self._prefix}([0-9]{{{_INDEX_DIGITS}}})")
        self._hidden: list[str] = []
        self._numbers: dict[str, int] = {}

    def hide_message(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """A message without special-token texts; an assistant's reasoning marks stay, for templates that
        look for them.
        """
        kept = REASONING_MARKS if message.get("role") == "assistant" else frozenset()
        hidden: dict[str, Any] = self.hide(message, kept)
        return hidden

    def hide(self, value: Any, kept: frozenset[str] = frozenset()) -> Any:
        """A copy of JSON-like `value` whose texts hold no special-token text but those in `kept`."""
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
        """A rendered text with what the placeholders stand for."""
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
