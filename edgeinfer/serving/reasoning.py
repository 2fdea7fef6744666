"""`reasoning_effort` and `chat_template_kwargs` of a request, as settings of the chat template."""

from collections.abc import Mapping, Sequence
from typing import Any

from edgeinfer.chat_templates.template_options import Thinking
from edgeinfer.errors import shown
from edgeinfer.serving.fields import RequestError

EFFORT = "reasoning_effort"
VARIABLES = "chat_template_kwargs"
_LEVELS: dict[str, Thinking] = {
    "none": "off",
    "minimal": "low",
    "low": "low",
    "medium": "medium",
    "high": "high",
    "xhigh": "high",
}


def template_settings(
    body: Mapping[str, Any], levels: Sequence[Thinking]
) -> tuple[dict[str, Any], list[str]]:
    """Keywords of `Model.stream`, and warnings. `levels`: reasoning levels of the template.

    Raises:
        RequestError: an invalid value.
    """
    settings: dict[str, Any] = {}
    variables = body.get(VARIABLES)
    if variables is not None:
        if not isinstance(variables, Mapping):
            raise RequestError(f"{VARIABLES}: saw {shown(variables)}, wanted an object", param=VARIABLES)
        settings["template_args"] = dict(variables)
    effort = body.get(EFFORT)
    if effort is None:
        return settings, []
    if not isinstance(effort, str) or effort not in _LEVELS:
        raise RequestError(f"{EFFORT}: saw {shown(effort)}, wanted one of {', '.join(_LEVELS)}", param=EFFORT)
    if not levels:
        return settings, [f"{EFFORT}: has no effect, the model's chat template has no setting for it"]
    requested = _LEVELS[effort]
    nearest: Thinking = "low" if requested == "off" else "on"
    settings["thinking"] = requested if requested in levels else nearest
    if settings["thinking"] == effort or (effort, requested) == ("none", settings["thinking"]):
        return settings, []
    return settings, [f"{EFFORT}: {effort!r} is {settings['thinking']!r} in the model's chat template"]
