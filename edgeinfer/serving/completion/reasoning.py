"""The reasoning that a request asks for, as settings of the chat template."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from edgeinfer.chat_templates.template_options import Thinking
from edgeinfer.errors import shown
from edgeinfer.model import Model
from edgeinfer.serving.completion.requests import CompletionRequest
from edgeinfer.serving.fields import RequestError

EFFORT = "reasoning_effort"
VARIABLES = "chat_template_kwargs"
_LEVELS: dict[str, Thinking] = {
    "none": "off",
    "on": "on",
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
    "max": "high",
}
_SHOWN = "none, minimal, low, medium, high, xhigh, max"


def template_args(body: Mapping[str, Any]) -> dict[str, Any]:
    """`chat_template_kwargs` as keywords of `Model.stream`. Raises `RequestError`: an invalid value."""
    variables = body.get(VARIABLES)
    if variables is None:
        return {}
    if not isinstance(variables, Mapping):
        raise RequestError(f"{VARIABLES}: saw {shown(variables)}, wanted an object", param=VARIABLES)
    return {"template_args": dict(variables)}


def with_reasoning(parsed: CompletionRequest, model: Model) -> CompletionRequest:
    """The request with its effort as the nearest setting of the model's template, and a warning if it is
    another one. Raises `RequestError`: an invalid value.
    """
    effort, name = parsed.effort, parsed.effort_field
    if effort is None:
        return parsed
    if not isinstance(effort, str) or effort not in _LEVELS:
        raise RequestError(f"{name}: saw {shown(effort)}, wanted one of {_SHOWN}", param=name)
    levels = model.thinking_levels
    if not levels:
        note = f"{name}: has no effect, the model's chat template has no setting for it"
        return parsed if effort == "none" else replace(parsed, warnings=(*parsed.warnings, note))
    thinking = _nearest(_LEVELS[effort], levels)
    parsed = replace(parsed, settings={**parsed.settings, "thinking": thinking})
    if thinking == effort or (effort, thinking) == ("none", "off"):
        return parsed
    note = f"{name}: {effort!r} is {thinking!r} in the model's chat template"
    return replace(parsed, warnings=(*parsed.warnings, note))


def _nearest(requested: Thinking, levels: tuple[Thinking, ...]) -> Thinking:
    if requested in levels:
        return requested
    if requested == "off":
        return "low"
    return "medium" if "on" not in levels else "on"
