"""Drops the oldest messages of a chat that is longer than the context."""

from dataclasses import replace
from typing import Any

from edgeinfer.model import Model
from edgeinfer.serving.completion.requests import CompletionRequest

RESERVED = 16
"""Fewest tokens that are left for the response."""


def truncated(model: Model, parsed: CompletionRequest, settings: dict[str, Any]) -> CompletionRequest:
    """The request without its oldest messages, if the prompt doesn't fit the context; the system prompt and
    the last message are kept. `settings`: the keywords of `Model.stream`.
    """
    limit = model.context - min(settings.get("max_tokens") or RESERVED, model.context // 2)
    messages = list(parsed.prompts[0])
    first = next((index for index, one in enumerate(messages) if one["role"] != "system"), 0)
    while len(messages) - first > 1 and len(model.prompt_ids(messages, **settings)) > limit:
        del messages[first]
        while len(messages) - first > 1 and messages[first]["role"] != "user":
            del messages[first]  # the responses and tool results that belong to the dropped message
    return replace(parsed, prompts=(messages,))
