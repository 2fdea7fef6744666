"""Drops the oldest messages of a chat that is longer than the context."""

from bisect import bisect_left
from dataclasses import replace
from typing import Any

from edgeinfer.model import Model
from edgeinfer.serving.completion.requests import CompletionRequest

RESERVED = 16
"""Fewest tokens that are left for the response."""


def truncated(model: Model, parsed: CompletionRequest, settings: dict[str, Any]) -> CompletionRequest:
    """The request without its oldest messages, if the prompt doesn't fit the context. The system prompt is
    kept, and the rest begins with a message of the user. `settings`: the keywords of `Model.stream`.
    """
    messages = parsed.prompts[0]
    system = next((index for index, one in enumerate(messages) if one["role"] != "system"), 0)
    later = [index for index in range(system + 1, len(messages)) if messages[index]["role"] == "user"]
    starts = [system, *(later or [len(messages) - 1])]
    limit: int = model.context - min(parsed.settings.get("max_tokens", RESERVED), model.context // 2)

    def fits(start: int) -> bool:
        return len(model.prompt_ids([*messages[:system], *messages[start:]], **settings)) <= limit

    # The first start from which all fit: fewer messages have fewer tokens.
    first = starts[min(bisect_left(starts, True, key=fits), len(starts) - 1)]
    return replace(parsed, prompts=([*messages[:system], *messages[first:]],))
