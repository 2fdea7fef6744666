"""What a model thinks before it answers, told apart from the answer."""

from dataclasses import dataclass

MARKS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<|channel|>analysis<|message|>", "<|end|>"),
)
"""Where a thought begins and ends."""
REASONING_MARKS = frozenset(mark for pair in MARKS[:-1] for mark in pair)
"""Those of them that templates look for in what the assistant said."""
BETWEEN = ("<|start|>assistant", "<|channel|>final<|message|>", "<|channel|>commentary<|message|>")
"""Marks that say nothing to a reader."""


@dataclass(frozen=True)
class Reply:
    """An answer's parts. `thinking`: the thought hasn't ended."""

    thought: str
    said: str
    thinking: bool = False


def parted(text: str, opened: bool = False, ended: bool = True) -> Reply:
    """Thoughts stand in front of the answer. `opened`: the template has begun one already; `ended`: no more
    text will come (until then the beginning of a mark is kept back).
    """
    thoughts: list[str] = []
    rest = text
    if opened or _closes_first(text):
        closing = next((end for _, end in MARKS if end in text), None)
        if closing is None:
            return Reply(text if ended else _without_half(text), "", not ended)
        thought, _, rest = text.partition(closing)
        thoughts.append(_bare(thought))
    while True:
        rest = rest.lstrip()
        mark = next((mark for mark in BETWEEN if rest.startswith(mark)), None)
        if mark is not None:
            rest = rest.removeprefix(mark)
            continue
        pair = next((pair for pair in MARKS if rest.startswith(pair[0])), None)
        if pair is None:
            break
        thought, closed, rest = rest.removeprefix(pair[0]).partition(pair[1])
        thoughts.append(thought)
        if not closed:
            thoughts[-1] = thought if ended else _without_half(thought)
            return Reply(_joined(thoughts), "", not ended)
    if not ended and any(mark.startswith(rest) for mark in _openings()):
        return Reply(_joined(thoughts), "")
    return Reply(_joined(thoughts), rest)


def closing_mark(prompt: str) -> str | None:
    """What ends the thought in whose middle a prompt leaves the model, as some templates do; None: none."""
    end = prompt.rstrip()
    return next((closing for opening, closing in MARKS if end.endswith(opening)), None)


def with_closed_thought(prompt: str) -> str:
    """The prompt with a thought that it opened ended, as templates write one that stays empty."""
    closing = closing_mark(prompt)
    return prompt if closing is None else f"{prompt.rstrip()}\n\n{closing}\n\n"


def without_thought(text: str) -> str:
    """What an answer said; to the letter, if it thought nothing."""
    said = parted(text).said
    return text if said == text.lstrip() else said


def _closes_first(text: str) -> bool:
    """Whether a thought ends that never began: the template of the day had begun it."""
    places = [text.find(end) for _, end in MARKS[:-1] if end in text]
    return bool(places) and not any(opening in text[: min(places)] for opening, _ in MARKS)


def _bare(thought: str) -> str:
    stripped = thought.lstrip()
    opening = next((opening for opening, _ in MARKS if stripped.startswith(opening)), "")
    return stripped.removeprefix(opening)


def _openings() -> list[str]:
    return [opening for opening, _ in MARKS] + list(BETWEEN)


def _without_half(text: str) -> str:
    """The text without the beginning of a closing mark at its end."""
    for _, end in MARKS:
        for length in range(min(len(end) - 1, len(text)), 0, -1):
            if text.endswith(end[:length]):
                return text[:-length]
    return text


def _joined(thoughts: list[str]) -> str:
    return "\n\n".join(thought.strip() for thought in thoughts if thought.strip())
