"""A client of tool servers: starts them, lists their tools and calls one, on a thread with an event loop."""

import asyncio
import tempfile
import threading
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import IO, TYPE_CHECKING, Any, TextIO, TypeVar, cast

from edgeinfer.chat_templates.tool_calls import Tool, check_tools
from edgeinfer.errors import EdgeInferError, SettingError, shortened
from edgeinfer.tool_servers.settings import ToolServer

if TYPE_CHECKING:
    from mcp import Client

START_SECONDS = 20.0
CLOSE_SECONDS = 5.0
CONNECT_SECONDS = 15.0
MAX_TOOLS = 128
MAX_NAME = 64
MAX_RESULT = 100_000
"""Characters of a result that the model reads."""
MAX_PAGES = 32
MAX_ERROR = 300
Result = TypeVar("Result")


class ToolServerError(EdgeInferError):
    """A tool server can't be started or reached."""


@dataclass(frozen=True)
class ToolResult:
    """The text of a call's result. `failed`: it is an error of the tool or of its server."""

    text: str
    failed: bool = False


@dataclass(frozen=True)
class OfferedTool:
    """A tool under the name that the model uses. `allowed`: it is called without a question."""

    name: str
    server: ToolServer
    inner: str
    schema: Tool
    allowed: bool


@dataclass
class _Connection:
    """A running server, until `leaving` is set."""

    server: ToolServer
    client: "Client | None" = None
    leaving: asyncio.Event = field(default_factory=asyncio.Event)
    log: IO[str] | None = None


class ToolServers:
    """The tool servers of one program. `start` before use, `close` at the end; calls from any thread."""

    def __init__(self, servers: Sequence[ToolServer]) -> None:
        """Raises `SettingError` if the package `mcp` is missing."""
        if servers and find_spec("mcp") is None:
            raise SettingError("tool servers need the package mcp; pip install 'edgeinfer[mcp]'")
        self._servers = list(servers)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="edgeinfer-tools", daemon=True)
        self._connections: dict[str, _Connection] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self.tools: dict[str, OfferedTool] = {}
        self.warnings: list[str] = []
        """One line for each server that can't be used, and each tool that is left out."""

    @property
    def schemas(self) -> list[Tool]:
        """The tools in the format of OpenAI's API, for `tools=` of a chat."""
        return [tool.schema for tool in self.tools.values()]

    def start(self) -> None:
        """Start all servers and list their tools. One that fails has a line in `warnings`."""
        self._thread.start()
        self._done(self._start_all()).result()

    def call(self, name: str, arguments: Mapping[str, Any]) -> "Future[ToolResult]":
        """Call a tool. The future never fails, except if it is cancelled, which cancels the call."""
        return self._done(self._call(name, dict(arguments)))

    def close(self) -> None:
        """Stop all servers."""
        if self._thread.is_alive():
            with suppress(TimeoutError):
                self._done(self._close_all()).result(CLOSE_SECONDS)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(CLOSE_SECONDS)
        if not self._loop.is_running():
            self._loop.close()

    def _done(self, work: Coroutine[Any, Any, Result]) -> "Future[Result]":
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _start_all(self) -> None:
        listed = await asyncio.gather(*map(self._start, self._servers))
        for server, tools in zip(self._servers, listed, strict=True):
            for tool in tools:
                self._offer(server, tool)

    async def _start(self, server: ToolServer) -> list[Any]:
        """The tools of a server, which has a task for itself; empty if it fails."""
        ready: asyncio.Future[list[Any]] = self._loop.create_future()
        task = asyncio.create_task(self._run(server, ready))
        self._tasks.append(task)
        try:
            return await asyncio.wait_for(asyncio.shield(ready), START_SECONDS)
        except TimeoutError:
            task.cancel()
            self.warnings.append(f"tool server {server.name}: no answer after {START_SECONDS:g} seconds")
        except ToolServerError as error:
            self.warnings.append(str(error))
        return []

    async def _run(self, server: ToolServer, ready: "asyncio.Future[list[Any]]") -> None:
        """Keep a connection open until it is to be closed; its client must be closed by the same task."""
        from mcp import Client

        connection = _Connection(server)
        try:
            with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as log:
                connection.log = log
                try:
                    target = _transport(server, log)
                    async with Client(target, read_timeout_seconds=server.timeout) as client:
                        connection.client = client
                        tools = await _all_tools(client)
                        self._connections[server.name] = connection
                        ready.set_result(tools)
                        await connection.leaving.wait()
                except Exception as error:
                    why = _line_of(error) or "it ended"
                    raise ToolServerError(f"tool server {server.name}: {why}{_last_line(log)}") from error
        except ToolServerError as error:
            if not ready.done():
                ready.set_exception(error)
        finally:
            self._connections.pop(server.name, None)

    def _offer(self, server: ToolServer, tool: Any) -> None:
        name = f"{server.name}__{tool.name}"
        function = {"name": name, "description": tool.description or "", "parameters": tool.input_schema}
        schema = {"type": "function", "function": function}
        try:
            check_tools([schema])
        except SettingError as error:
            self.warnings.append(f"tool server {server.name}: {error}")
            return
        if len(name) > MAX_NAME or not name.isascii() or not name.replace("-", "_").isidentifier():
            self.warnings.append(
                f"tool server {server.name}: the tool {shortened(tool.name)!r} is left out: its name"
            )
        elif len(self.tools) >= MAX_TOOLS:
            self.warnings.append(
                f"tool server {server.name}: {tool.name} is left out: more than {MAX_TOOLS} tools"
            )
        else:
            self.tools[name] = OfferedTool(name, server, tool.name, schema, tool.name in server.allow)

    async def _call(self, name: str, arguments: dict[str, Any]) -> ToolResult:
        tool = self.tools.get(name)
        if tool is None:
            return ToolResult(f"error: no tool {shortened(name)!r}", failed=True)
        connection = self._connections.get(tool.server.name)
        if connection is None or connection.client is None:
            return ToolResult(f"error: the tool server {tool.server.name} has ended", failed=True)
        try:
            async with asyncio.timeout(tool.server.timeout):
                result = await connection.client.call_tool(tool.inner, arguments)
        except TimeoutError:
            return ToolResult(f"error: {name}: no result after {tool.server.timeout:g} seconds", failed=True)
        except Exception as error:
            return ToolResult(f"error: {name}: {_line_of(error) or 'its server has ended'}", failed=True)
        return ToolResult(_text_of(result), bool(result.is_error))

    async def _close_all(self) -> None:
        for connection in list(self._connections.values()):
            connection.leaving.set()
        await asyncio.wait(self._tasks, timeout=CLOSE_SECONDS) if self._tasks else None
        for task in self._tasks:
            task.cancel()


def _transport(server: ToolServer, log: IO[str]) -> Any:
    """What the client connects to; the standard error of a program goes to `log`."""
    if server.url is not None:
        return _http(server.url, server.headers)
    from mcp import StdioServerParameters, stdio_client

    assert server.command is not None
    parameters = StdioServerParameters(command=server.command, args=list(server.args), env=dict(server.env))
    return stdio_client(parameters, errlog=cast(TextIO, log))


@asynccontextmanager
async def _http(url: str, headers: Mapping[str, str]) -> AsyncIterator[Any]:
    """Streams to a server over HTTP. An event stream may be silent for long; calls have their own timeout."""
    from httpx2 import AsyncClient, Timeout
    from mcp.client.streamable_http import streamable_http_client

    async with (
        AsyncClient(headers=dict(headers), timeout=Timeout(CONNECT_SECONDS, read=None)) as http,
        streamable_http_client(url, http_client=http) as streams,
    ):
        yield streams


async def _all_tools(client: "Client") -> list[Any]:
    """The tools of all pages."""
    tools: list[Any] = []
    cursor = None
    for _ in range(MAX_PAGES):
        listed = await client.list_tools(cursor=cursor)
        tools += listed.tools
        cursor = listed.next_cursor
        if cursor is None or len(tools) >= MAX_TOOLS:
            break
    return tools


def _text_of(result: Any) -> str:
    """The text of a result; other content is named by its type."""
    parts = [part.text if part.type == "text" else f"[{part.type}]" for part in result.content]
    text = "\n".join(parts)
    left_out = len(text) - MAX_RESULT
    return text if left_out <= 0 else f"{text[:MAX_RESULT]}\n[{left_out} more characters]"


def _line_of(error: BaseException) -> str:
    """The first error of a group, on one line."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return " ".join(str(error).split())[:MAX_ERROR]


def _last_line(log: IO[str]) -> str:
    """The last line that a program wrote to its standard error, in brackets."""
    log.seek(0)
    lines = [line.strip() for line in log.read()[-10_000:].splitlines() if line.strip()]
    return f" ({lines[-1][:MAX_ERROR]})" if lines else ""
