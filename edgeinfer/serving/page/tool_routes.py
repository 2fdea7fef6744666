"""The tools of the page: which there are, and a call, which the user has confirmed there."""

import asyncio

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgeinfer.errors import shown
from edgeinfer.serving.apis import Server
from edgeinfer.serving.fields import KnownFields, RequestError, check_fields, checked_text
from edgeinfer.serving.page.chat_routes import HEADERS
from edgeinfer.serving.page.page import Page
from edgeinfer.serving.transport.bodies import unless_disconnected
from edgeinfer.serving.transport.records import CLIENT_LEFT

CALL = KnownFields(frozenset(("name", "arguments")))


async def list_tools(page: Page, request: Request, server: Server) -> Response:
    """The tools in OpenAI's format, and the names of those that are called without a question."""
    tools = [] if page.tools is None else list(page.tools.tools.values())
    fields = {
        "tools": [tool.schema for tool in tools],
        "allowed": [tool.name for tool in tools if tool.allowed],
        "warnings": [] if page.tools is None else page.tools.warnings,
    }
    return JSONResponse(fields, headers=HEADERS)


async def call_tool(page: Page, request: Request, server: Server) -> Response:
    """Call a tool; a client that disconnects cancels the call."""
    body = await server.body(request)
    check_fields(body, CALL)
    name, arguments = checked_text(body, "name"), body.get("arguments")
    if not isinstance(arguments, dict):
        raise RequestError(f"arguments: saw {shown(arguments)}, wanted an object", param="arguments")
    if page.tools is None or name not in page.tools.tools:
        raise RequestError(f"name: saw {shown(name)}, wanted a tool of this page", status=404, param="name")
    call = asyncio.wrap_future(page.tools.call(name, arguments))
    result = await unless_disconnected(request, call)
    if result is None:
        return Response(status_code=CLIENT_LEFT)
    return JSONResponse({"content": result.text, "failed": result.failed}, headers=HEADERS)
