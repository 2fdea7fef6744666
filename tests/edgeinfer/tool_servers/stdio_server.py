"""A tool server for tests, over standard input and output, or over HTTP if it gets a port."""

import asyncio
import os
import sys

from mcp.server.mcpserver import MCPServer

server = MCPServer("test")


@server.tool()
def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


@server.tool()
def echo(text: str) -> str:
    """Return a text."""
    return text


@server.tool()
def fail() -> str:
    """Fail."""
    raise ValueError("it\nfailed")


@server.tool()
async def wait() -> str:
    """Return after an hour."""
    await asyncio.sleep(3600)
    return "late"


@server.tool()
def variable(name: str) -> str:
    """Return an environment variable."""
    return os.environ.get(name, "not set")


@server.tool()
def leave() -> str:
    """End the server."""
    os._exit(3)


if __name__ == "__main__":
    if len(sys.argv) > 1:
        server.run("streamable-http", host="127.0.0.1", port=int(sys.argv[1]))
    else:
        server.run("stdio")
