"""The tool servers of the settings file, while a command runs."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from edgeinfer_tui.failures import say

if TYPE_CHECKING:
    from edgeinfer.tool_servers.client import ToolServers


@contextmanager
def running_tool_servers() -> "Iterator[ToolServers]":
    """The servers of the settings file, started; a line for each one that fails.

    Raises:
        SettingError: there is none, or the package mcp is missing.
    """
    from edgeinfer.errors import SettingError
    from edgeinfer.tool_servers.client import ToolServers
    from edgeinfer_tui.options.settings import config_file, configured_tool_servers

    servers = configured_tool_servers()
    if not servers:
        raise SettingError(f"--mcp: saw no [mcp.NAME] in {config_file()}, wanted one for each tool server")
    tools = ToolServers(servers)
    try:
        tools.start()
        for line in tools.warnings:
            say(line)
        yield tools
    finally:
        tools.close()
