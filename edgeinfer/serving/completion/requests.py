"""The internal form of a completion request, and what the readers of all APIs share."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from edgeinfer.serving.completion.tool_choice import NO_CALLS, ToolUse
from edgeinfer.serving.fields import SAMPLING, RequestError, checked_list

MAX_STOPS = 64
MAX_STOP_LENGTH = 1000
MAX_BIASES = 1024
MAX_BREAKERS = 64


@dataclass(frozen=True)
class CompletionRequest:
    """What a reader makes of a body: prompts (texts, ids or messages) and the keywords of `Model.stream`.

    `tool_use`: the offered tools and how they may be called. `effort`: the requested reasoning
    (`reasoning.py`); what it means depends on the model's template. `keep_alive`: seconds that the model
    stays loaded after the request.
    """

    model: str
    prompts: tuple[Any, ...]
    settings: dict[str, Any] = field(default_factory=dict)
    tool_use: ToolUse = NO_CALLS
    effort: str | None = None
    effort_field: str = "reasoning_effort"
    count: int = 1
    streamed: bool = False
    usage_at_end: bool = False
    echo: bool = False
    truncates: bool = False
    """Whether the oldest messages are dropped if the chat is longer than the context."""
    keep_alive: float | None = None
    warnings: tuple[str, ...] = ()


def body_of(raw: bytes) -> dict[str, Any]:
    """The JSON object of a request."""
    body = json_of(raw)
    if not isinstance(body, dict):
        raise RequestError(f"the body: saw {type(body).__name__}, wanted a JSON object")
    if b"\\ud" in raw.lower():
        try:
            json.dumps(body, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise RequestError("the body: saw half a surrogate pair, wanted whole characters") from None
    return body


def json_of(raw: bytes) -> Any:
    """The JSON value of a request. Raises `RequestError`."""
    try:
        return json.loads(raw, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"the body isn't JSON: {' '.join(str(error).split())[:120]}") from None


def _no_constant(name: str) -> None:
    raise ValueError(f"saw {name}, which JSON doesn't have")


def sampling_settings(body: Mapping[str, Any]) -> dict[str, Any]:
    """Sampling parameters and limits; the model itself refuses values out of range."""
    settings = {name: body[name] for name in SAMPLING if body.get(name) is not None}
    if isinstance(settings.get("stop"), list):
        for text in checked_list(settings["stop"], "stop", MAX_STOPS, "texts"):
            if isinstance(text, str) and len(text) > MAX_STOP_LENGTH:
                raise RequestError(f"stop: saw {len(text)} characters, wanted {MAX_STOP_LENGTH} at most")
    if "dry_sequence_breakers" in settings:
        breakers = checked_list(
            settings["dry_sequence_breakers"], "dry_sequence_breakers", MAX_BREAKERS, "a list of texts"
        )
        settings["dry_sequence_breakers"] = tuple(breakers)
    if "logit_bias" in settings:
        settings["logit_bias"] = _biases(settings["logit_bias"])
    return settings


def _biases(biases: Any) -> dict[int, float]:
    try:
        if len(biases) > MAX_BIASES:
            raise RequestError(
                f"logit_bias: saw {len(biases)}, wanted {MAX_BIASES} at most", param="logit_bias"
            )
        values = {int(token): float(bias) for token, bias in biases.items()}
    except (AttributeError, TypeError, ValueError, OverflowError):
        raise RequestError("logit_bias: wanted token ids with numbers", param="logit_bias") from None
    if not all(map(math.isfinite, values.values())):
        raise RequestError("logit_bias: wanted finite numbers", param="logit_bias")
    return values


def prompts_of(parsed: CompletionRequest) -> Sequence[tuple[int, Any]]:
    """Index and prompt of each completion: `count` completions of the first prompt, then of the next."""
    return list(enumerate(prompt for prompt in parsed.prompts for _ in range(parsed.count)))
