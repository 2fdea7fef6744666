"""Marks of reasoning in a model's output; several consist of a special token and a word after it."""

import re
from typing import NamedTuple


class ReasoningMarks(NamedTuple):
    """The marks of a reasoning block. `shared`: the closing one ends other parts of an output too, so it
    doesn't show by itself that there was reasoning.
    """

    opening: str
    closing: str
    shared: bool = False


MARKS = (
    ReasoningMarks("<think>", "</think>"),
    ReasoningMarks("<thinking>", "</thinking>"),
    ReasoningMarks("<thought>", "</thought>"),
    ReasoningMarks("<reasoning>", "</reasoning>"),
    ReasoningMarks("<seed:think>", "</seed:think>"),
    ReasoningMarks("<mm:think>", "</mm:think>"),  # MiniMax M3
    ReasoningMarks("<think:opensource>", "</think:opensource>"),  # Hunyuan 3
    ReasoningMarks("[THINK]", "[/THINK]"),
    ReasoningMarks("◁think▷", "◁/think▷"),
    ReasoningMarks("<|START_THINKING|>", "<|END_THINKING|>"),  # Cohere
    ReasoningMarks("<|channel>thought", "<channel|>"),  # Gemma 4
    ReasoningMarks("<|open|>think<|sep|>", "<|close|>think<|sep|>"),  # Kimi K3
    ReasoningMarks("<|channel|>analysis<|message|>", "<|end|>", shared=True),  # gpt-oss
    ReasoningMarks("to=self<|message|>", "<|eom|>", shared=True),  # Muse Glimmer
    ReasoningMarks("<|think|>", "<|end|>", shared=True),  # Solar Open
)
_SHOWN_BEFORE_RESPONSE = (
    *("<|start|>assistant", "<|channel|>final<|message|>", "<|channel|>commentary<|message|>"),
    *("<|message|>", "<|open|>response<|sep|>", "<|begin|>assistant", "<|content|>"),
)
BEFORE_RESPONSE = (*_SHOWN_BEFORE_RESPONSE, "<|START_RESPONSE|>", "<|START_TEXT|>")
"""Marks before a response that are removed."""
AFTER_RESPONSE = ("<|close|>response<|sep|>", "<|END_RESPONSE|>", "<|END_TEXT|>", "<|eom|>")
"""Marks after a response that are removed."""

_TOKEN = re.compile(r"<[^<>]+>|\[/?THINK\]|◁[^▷]*▷")
TOKEN_TEXTS = frozenset(
    token
    for mark in (*(each for marks in MARKS for each in marks[:2]), *_SHOWN_BEFORE_RESPONSE)
    for token in _TOKEN.findall(mark)
)
"""The special tokens of these marks: shown even if a file defines them as control tokens."""
