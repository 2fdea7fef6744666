"""The tools of a chat: started with it, offered to models whose template has tools, and called."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from edgeinfer.history.tree import ChatMessage
from edgeinfer_tui.app.tools.call_screen import Answer
from edgeinfer_tui.failures import one_line

if TYPE_CHECKING:
    from edgeinfer.chat_templates.tool_calls import ToolCall
    from edgeinfer.tool_servers.client import ToolResult, ToolServers

REFUSED = "error: the user refused this call"
MAX_ROUNDS = 20
"""Responses with tool calls to one message."""


class ChatTools:
    """The servers of the settings file. `is_enabled` False: there are no tools."""

    def __init__(self, is_enabled: bool) -> None:
        self._is_enabled = is_enabled
        self._servers: ToolServers | None = None
        self._always: set[str] = set()
        self._call: asyncio.Future[ToolResult] | None = None
        self._is_stopped = False
        self.is_calling = False

    async def start(self) -> list[str]:
        """Start the servers; returns a line for each one that can't be used."""
        try:
            self._servers = await asyncio.to_thread(_started) if self._is_enabled else None
        except Exception as error:
            return [one_line(error)]
        return [] if self._servers is None else self._servers.warnings

    def schemas(self, chat_format: Any) -> list[Any]:
        """The tools for a model; none if its chat template has none."""
        from edgeinfer.chat_templates.chat_format import ChatFormat
        from edgeinfer.endpoint.remote_model import RemoteChatFormat

        if self._servers is None or not isinstance(chat_format, ChatFormat | RemoteChatFormat):
            return []
        return self._servers.schemas if "tools" in chat_format.variables() else []

    async def results(
        self, calls: "Sequence[ToolCall]", ask: "Callable[[ToolCall], Awaitable[Answer]]"
    ) -> list[tuple[str, str]] | None:
        """The results of calls, in their order; None: the user stopped. `ask` shows a call."""
        self.is_calling, self._is_stopped = True, False
        try:
            results = []
            for call in calls:
                results.append((call.name, await self._result(call, ask)))
                if self._is_stopped:
                    return None
            return results
        finally:
            self.is_calling = False

    async def _result(self, call: "ToolCall", ask: "Callable[[ToolCall], Awaitable[Answer]]") -> str:
        servers = self._servers
        if servers is None:
            return "error: there are no tools"
        tool = servers.tools.get(call.name)
        if call.name not in self._always and not (tool is not None and tool.allowed):
            answer = await ask(call)
            if answer == "no":
                return REFUSED
            if answer == "always":
                self._always.add(call.name)
        self._call = asyncio.wrap_future(servers.call(call.name, call.arguments))
        try:
            return (await self._call).text
        except asyncio.CancelledError:
            if not self._is_stopped:
                raise
            return ""
        finally:
            self._call = None

    def stop(self) -> bool:
        """Stop the calls; False if there is none."""
        if self.is_calling:
            self._is_stopped = True
            if self._call is not None:
                self._call.cancel()
        return self.is_calling

    def close(self) -> None:
        """Stop the servers."""
        if self._servers is not None:
            self._servers.close()


def has_too_many_rounds(response: ChatMessage) -> bool:
    """Whether the tools were called as often as is allowed for one message."""
    rounds, at = 0, response.parent
    while at is not None and at.role != "user":
        rounds += at.role == "tool"
        at = at.parent
    return rounds >= MAX_ROUNDS


def _started() -> "ToolServers | None":
    from edgeinfer_tui.options.settings import configured_tool_servers

    configured = configured_tool_servers()
    if not configured:
        return None
    from edgeinfer.tool_servers.client import ToolServers

    servers = ToolServers(configured)
    servers.start()
    return servers
