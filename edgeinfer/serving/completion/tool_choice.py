"""The tools of a request and how they may be called: freely, or forced through constrained decoding."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from edgeinfer.chat_templates.tool_calls import Tool, check_tools, schemas_of
from edgeinfer.errors import shortened, shown
from edgeinfer.serving.fields import RequestError, checked_bool, checked_list
from edgeinfer.structured.call_grammar import call_grammar

MAX_TOOLS = 128
CHOICES = ("auto", "none", "required")


@dataclass(frozen=True)
class ToolUse:
    """`tools`: those that the chat template writes. `forced`: the response is a call. `parallel`: a response
    may have several calls; further ones are dropped.
    """

    tools: tuple[Tool, ...] = ()
    forced: bool = False
    only: str | None = None
    """The one tool that may be called; None: any."""
    parallel: bool = True
    several: bool = False
    """Whether a forced response is a list of calls."""

    def combined(self, settings: dict[str, Any]) -> dict[str, Any]:
        """The keywords of `Model.stream`: these settings, with the tools and the grammar of their calls.

        With a schema, the response is JSON of the schema, or a call.

        Raises:
            RequestError: a forced call, and a schema or a grammar.
            SettingError: a schema that isn't valid.
        """
        constrained = settings.get("schema"), settings.get("grammar")
        if self.forced and any(each is not None for each in constrained):
            raise RequestError(
                "tool_choice: a forced call excludes response_format and grammar; leave one of them out",
                param="tool_choice",
            )
        schema = settings.get("schema")
        if not self.tools or self.forced or not isinstance(schema, Mapping):
            return {**settings, **self._settings}
        others = {name: value for name, value in settings.items() if name != "schema"}
        return {**others, "tools": self.tools, "grammar": call_grammar(self.tools, or_schema=schema)}

    @property
    def _settings(self) -> dict[str, Any]:
        """Keywords of `Model.stream`. Raises `SettingError`."""
        if not self.tools:
            return {}
        if not self.forced:
            return {"tools": self.tools}
        allowed = [tool for tool in self.tools if self.only in (None, _name(tool))]
        return {"tools": self.tools, "grammar": call_grammar(allowed, self.several)}


NO_CALLS = ToolUse()


def tool_use(tools: Any, choice: Any, parallel: Any) -> ToolUse:
    """The tools from OpenAI's `tools`, `tool_choice` and `parallel_tool_calls`. Raises `RequestError`."""
    given = tuple(checked_list(tools, "tools", MAX_TOOLS, "a list of functions"))
    check_tools(given)
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        given, choice = _allowed(given, choice)
    selected, only = _choice(choice)
    if selected in (None, "auto", "none"):
        given = () if selected == "none" else given
        may = parallel is None or checked_bool({"parallel_tool_calls": parallel}, "parallel_tool_calls")
        return ToolUse(given, parallel=may)
    several = checked_bool({"parallel_tool_calls": parallel}, "parallel_tool_calls") and only is None
    return forced_use(given, only, several)


def forced_use(tools: Sequence[Tool], only: str | None, several: bool = False) -> ToolUse:
    """The tools of a response that must be a call, of the tool `only` if it isn't None."""
    names = list(schemas_of(tools))
    if not names:
        raise RequestError("tool_choice: needs tools, saw none", param="tool_choice")
    if only is not None and only not in names:
        first = ", ".join(map(shortened, names[:4]))
        raise RequestError(
            f"tool_choice: saw {shown(only)}, wanted one of the tools: {first}", param="tool_choice"
        )
    return ToolUse(tuple(tools), True, only, several, several)


def _choice(choice: Any) -> tuple[str | None, str | None]:
    """auto, none or required, and the name of a tool."""
    if choice is None or (isinstance(choice, str) and choice in CHOICES):
        return choice, None
    if isinstance(choice, Mapping) and choice.get("type") == "function":
        function = choice.get("function", choice)
        name = function.get("name") if isinstance(function, Mapping) else None
        if isinstance(name, str):
            return "required", name
    raise RequestError(
        f"tool_choice: saw {shown(choice)}, wanted auto, none, required, or a function by name",
        param="tool_choice",
    )


def _allowed(tools: tuple[Tool, ...], choice: Mapping[str, Any]) -> tuple[tuple[Tool, ...], Any]:
    """The allowed tools of OpenAI's `allowed_tools`, and its mode."""
    inner = choice.get("allowed_tools", choice)  # the Responses API has no inner object
    inner = inner if isinstance(inner, Mapping) else {}
    mode, listed = inner.get("mode"), inner.get("tools")
    if mode not in ("auto", "required") or not isinstance(listed, list):
        raise RequestError(
            f"tool_choice: saw {shown(choice)}, wanted allowed_tools with mode auto or required, and tools",
            param="tool_choice",
        )
    names = [_choice(each)[1] for each in listed]
    offered = {_name(tool): tool for tool in tools}
    for name in names:
        if name not in offered:
            raise RequestError(
                f"tool_choice: saw {shown(name)}, wanted functions of tools", param="tool_choice"
            )
    return tuple(tool for name, tool in offered.items() if name in names), mode


def _name(tool: Tool) -> str | None:
    return next(iter(schemas_of([tool])), None)
