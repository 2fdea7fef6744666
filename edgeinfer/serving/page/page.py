"""The page of one server: the chat store that it uses, and the settings with which it opens."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from edgeinfer.serving.page.chat_thread import ChatThread
from edgeinfer.tool_servers.client import ToolServers


class Page:
    """`chats`: file of the chat store; None: that of the terminal chat. `system`: the system prompt of new
    chats. `settings`: fields of every request for a completion. `tools`: servers whose tools the page
    offers; they are started by the caller, who closes them.
    """

    def __init__(
        self,
        chats: Path | None = None,
        system: str | None = None,
        settings: Mapping[str, Any] | None = None,
        tools: ToolServers | None = None,
    ) -> None:
        self.chats = ChatThread(chats)
        self.system = system
        self.settings = dict(settings or {})
        self.tools = tools

    async def close(self) -> None:
        """Close the chat store."""
        await self.chats.close()
