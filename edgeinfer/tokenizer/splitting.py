"""Splits a text into the words that a byte-pair tokenizer merges."""

import re
from collections.abc import Callable, Iterator

from edgeinfer.tokenizer.pre_tokenizers import GroupDigits, PreTokenizer, Split
from edgeinfer.tokenizer.unicode_classes import class_table, class_table_with_han, class_text

Cuts = list[int]
"""Ends of pieces, ascending; the last is the length of the text."""

_SHORT = 64
"""Up to this length a repeated search is faster than an iterator."""
_WIDE = "\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"
_WIDE_WHITESPACE = re.compile(f"[{_WIDE}]")
NOT_WHITESPACE = re.compile(f"[^\t-\r {_WIDE}]+")


class Splitter:
    """The stages of one pre-tokenizer, compiled."""

    def __init__(self, pre_tokenizer: PreTokenizer) -> None:
        self._stages = [_compiled(stage) for stage in pre_tokenizer.stages]

    def words(self, text: str) -> Iterator[str]:
        """Yield the words of `text`; joined, they are the text."""
        start = 0
        for end in self.cuts(text):
            yield text[start:end]
            start = end

    def cuts(self, text: str) -> Cuts:
        """Return the end of each word of `text`."""
        cuts = [len(text)] if text else []
        for readable, cut in self._stages:
            cuts = cut(readable(text), cuts)
        return cuts


def _compiled(stage: Split | GroupDigits) -> tuple[Callable[[str], str], Callable[[str, Cuts], Cuts]]:
    """Return the function that converts the text for a stage, and the one that splits the result."""
    if isinstance(stage, GroupDigits):
        digits = re.compile(stage.digit, re.ASCII)
        joins = stage.joins_text_before
        return _as_classes, lambda text, cuts: _cut_digits(digits, joins, text, cuts)
    pattern = re.compile(stage.pattern, re.ASCII)
    readings = {
        "classes": _as_classes,
        "classes with han": _as_classes_with_han,
        "characters": _as_characters,
    }
    return readings[stage.reads], lambda text, cuts: _cut_matches(pattern, text, cuts)


def _as_classes(text: str) -> str:
    return class_text(text, class_table())


def _as_classes_with_han(text: str) -> str:
    return class_text(text, class_table_with_han())


def _as_characters(text: str) -> str:
    return text if text.isascii() else _WIDE_WHITESPACE.sub("\v", text)


def _cut_matches(pattern: re.Pattern[str], text: str, cuts: Cuts) -> Cuts:
    """Split each piece before and after every match; a match doesn't extend beyond its piece."""
    finer: Cuts = []
    add = finer.append
    search = pattern.search
    start = 0
    for end in cuts:
        if end - start > _SHORT:
            for match in pattern.finditer(text, start, end):
                first, last = match.span()
                if first > start:
                    add(first)
                add(last)
                start = last
        else:
            while start < end and (hit := search(text, start, end)):
                first, last = hit.span()
                if first > start:
                    add(first)
                add(last)
                start = last
        if start < end:
            add(end)
        start = end
    return finer


def _cut_digits(digits: re.Pattern[str], joins_text_before: bool, text: str, cuts: Cuts) -> Cuts:
    """Split each run of digits into groups of three from the right (see `GroupDigits`)."""
    finer: Cuts = []
    start = 0
    for end in cuts:
        for match in digits.finditer(text, start, end):
            first, last = match.span()
            odd = (last - first) % 3
            if joins_text_before:
                finer.extend(range(first + (odd or 3), last + 1, 3))
            else:
                finer.extend(at for at in range(first + odd, last, 3) if at > start)
        if not finer or finer[-1] < end:
            finer.append(end)
        start = end
    return finer
