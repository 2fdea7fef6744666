"""Parts of a message: its head, the folded reasoning, and the tool calls of a response."""

import json
from collections.abc import Sequence
from typing import Protocol, cast

from textual.content import Content
from textual.widgets import Static

from edgeinfer.chat_templates.reasoning import Reply
from edgeinfer.chat_templates.tool_calls import ParsedReply, ToolCall, call_start, written_calls
from edgeinfer_tui.output.terminal_output import CONTROL_REPLACEMENTS

MAX_VALUE = 500
"""Characters of an argument that are shown."""


class Askable(Protocol):
    """The message of a head."""

    def ask(self, what: str) -> None: ...


class MessageHead(Static):
    """The line above a message; words in brackets can be clicked."""

    def action_ask(self, what: str) -> None:
        cast(Askable, self.parent).ask(what)


class ReasoningView(Static):
    """The reasoning of a response, folded to one line; a click unfolds it."""

    def __init__(self) -> None:
        super().__init__(markup=False)
        self.unfolded = False
        self._reply = Reply("", "")

    def show(self, reply: Reply) -> None:
        self._reply = reply
        self.display = bool(reply.reasoning)
        if self.display:
            words = len(reply.reasoning.split())
            doing = "thinking ..." if reply.thinking else "reasoning"
            head = f"{'v' if self.unfolded else '>'} {doing} ({words} words)"
            body = f"\n{reply.reasoning.strip().translate(CONTROL_REPLACEMENTS)}" if self.unfolded else ""
            self.update(Content(head + body))

    def toggle(self) -> None:
        self.unfolded = not self.unfolded
        self.show(self._reply)

    def on_click(self) -> None:
        self.toggle()


class ToolCallsView(Static):
    """The tool calls of a response, one below the other; nothing runs them here."""

    def __init__(self) -> None:
        super().__init__(markup=False)
        self.display = False

    def show(self, calls: Sequence[ToolCall], is_coming: bool) -> None:
        """Display the calls; `is_coming`: one has begun."""
        lines = [call_line(call) for call in calls]
        if is_coming:
            lines.append(Content.styled("calls a tool ...", "italic"))
        self.display = bool(lines)
        self.update(Content("\n").join(lines))


def call_line(call: ToolCall) -> Content:
    """For example: tool call: get_weather(city="Zurich", days=2)."""
    arguments = ", ".join(f"{name}={_shown(value)}" for name, value in call.arguments.items())
    return Content.assemble(
        "tool call: ", Content.styled(call.name, "bold"), f"({arguments})".translate(CONTROL_REPLACEMENTS)
    )


def _shown(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= MAX_VALUE else f"{text[: MAX_VALUE - 3]}..."


def with_calls(response: str, ended: bool) -> tuple[ParsedReply, bool]:
    """The text and the calls of a response, and whether it has begun a call that isn't complete."""
    reply = written_calls(response)
    start = None if ended or reply.calls else call_start(response)
    if start is None:
        return reply, False
    return ParsedReply(response[:start].rstrip(), ()), True
