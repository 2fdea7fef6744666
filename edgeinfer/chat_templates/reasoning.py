"""Splits a model's output into reasoning and response."""

from dataclasses import dataclass

from edgeinfer.tokenizer.reasoning_marks import AFTER_RESPONSE, BEFORE_RESPONSE, MARKS

_ALONE = tuple(marks for marks in MARKS if not marks.shared)
"""The marks whose closing one shows that there was reasoning."""
REASONING_MARKS = frozenset(mark for marks in _ALONE for mark in marks[:2])
"""The marks that templates search for in assistant messages."""


@dataclass(frozen=True)
class Reply:
    """The parts of an output. `thinking`: the reasoning hasn't ended."""

    reasoning: str
    response: str
    thinking: bool = False


def parted(text: str, opened: bool = False, ended: bool = True) -> Reply:
    """Split off the reasoning before the response. `opened`: the template has already opened a reasoning
    block; `ended`: the text is complete (otherwise a possible prefix of a mark at the end is held back).
    """
    parts: list[str] = []
    rest = text
    if opened or _closes_first(text):
        closing = next((marks.closing for marks in MARKS if marks.closing in text), None)
        if closing is None:
            return Reply(text if ended else _without_partial_mark(text), "", not ended)
        part, _, rest = text.partition(closing)
        parts.append(_bare(part))
    while True:
        rest = rest.lstrip()
        mark = next((mark for mark in BEFORE_RESPONSE if rest.startswith(mark)), None)
        if mark is not None:
            rest = rest.removeprefix(mark)
            continue
        marks = next((marks for marks in MARKS if rest.startswith(marks.opening)), None)
        if marks is None:
            break
        part, closed, rest = rest.removeprefix(marks.opening).partition(marks.closing)
        parts.append(part)
        if not closed:
            parts[-1] = part if ended else _without_partial_mark(part)
            return Reply(_joined(parts), "", not ended)
    if not ended and any(mark.startswith(rest) for mark in _openings()):
        return Reply(_joined(parts), "")
    mark = next((mark for mark in AFTER_RESPONSE if rest.endswith(mark)), "")
    return Reply(_joined(parts), rest.removesuffix(mark))


def closing_mark(prompt: str) -> str | None:
    """The mark that closes a reasoning block which the prompt leaves open; None: it leaves none open."""
    end = prompt.rstrip()
    return next((marks.closing for marks in MARKS if end.endswith(marks.opening)), None)


def with_closed_reasoning(prompt: str) -> str:
    """The prompt with its open reasoning block closed, as templates write an empty one."""
    closing = closing_mark(prompt)
    return prompt if closing is None else f"{prompt.rstrip()}\n\n{closing}\n\n"


def without_reasoning(text: str) -> str:
    """The response without reasoning; unchanged if there is none."""
    response = parted(text).response
    return text if response == text.lstrip() else response


def split_reasoning(text: str) -> tuple[str, str]:
    """The reasoning between tags at the start of an output, with its tags, and the text after it; ("", text)
    without reasoning, or if it isn't closed.
    """
    start = text.lstrip()
    opened = [marks for marks in _ALONE if start.startswith(marks.opening)]
    closings = [marks.closing for marks in opened or (_ALONE if _closes_first(text) else ())]
    ends = [text.find(closing) + len(closing) for closing in closings if closing in text]
    return (text[: min(ends)], text[min(ends) :]) if ends else ("", text)


def _closes_first(text: str) -> bool:
    """Whether the text closes a reasoning block that it doesn't open, because an earlier template opened
    it.
    """
    starts = [text.find(marks.closing) for marks in _ALONE if marks.closing in text]
    return bool(starts) and not any(marks.opening in text[: min(starts)] for marks in MARKS)


def _bare(part: str) -> str:
    stripped = part.lstrip()
    opening = next((marks.opening for marks in MARKS if stripped.startswith(marks.opening)), "")
    return stripped.removeprefix(opening)


def _openings() -> list[str]:
    return [*(marks.opening for marks in MARKS), *BEFORE_RESPONSE]


def _without_partial_mark(text: str) -> str:
    """The text without a partial closing mark at its end."""
    for marks in MARKS:
        for length in range(min(len(marks.closing) - 1, len(text)), 0, -1):
            if text.endswith(marks.closing[:length]):
                return text[:-length]
    return text


def _joined(parts: list[str]) -> str:
    return "\n\n".join(part.strip() for part in parts if part.strip())
