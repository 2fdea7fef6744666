"""The paths of the page: its files, its state, the plan of a model, and completions."""

import asyncio
from collections.abc import Iterator, Mapping
from functools import cache, partial
from importlib.resources import files
from importlib.resources.abc import Traversable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from edgeinfer.errors import shortened
from edgeinfer.serving.apis import AnyRoute, CompletionRoute, PlainRoute, Server
from edgeinfer.serving.fields import RequestError
from edgeinfer.serving.models.models import ModelCard
from edgeinfer.serving.page.chat_routes import HEADERS, chat_routes
from edgeinfer.serving.page.completions import page_format, page_request
from edgeinfer.serving.page.page import Page
from edgeinfer.serving.page.tool_routes import call_tool, list_tools

TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".svg": "image/svg+xml",
}
POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
"""Only files of this server are loaded; no text becomes HTML or a script."""
FILE_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def page_routes(page: Page) -> tuple[AnyRoute, ...]:
    """The routes of the page. Its files need no key: the page asks for it."""
    return (
        PlainRoute("/", _index, is_open=True),
        PlainRoute("/page/static/{name:path}", _static, is_open=True, is_logged=False),
        PlainRoute("/page/state", partial(_state, page), is_logged=False),
        PlainRoute("/page/plan", _plan, is_logged=False),
        CompletionRoute("/page/completions", page_request, page_format),
        PlainRoute("/page/tools", partial(list_tools, page), is_logged=False),
        PlainRoute("/page/tools/call", partial(call_tool, page), ("POST",)),
        *chat_routes(page.chats),
    )


@cache
def page_files() -> Mapping[str, bytes]:
    """The static files by path."""
    folder = files("edgeinfer.serving.page") / "static"
    return {name: content for name, content in _files(folder, "") if name.endswith(tuple(TYPES))}


def _files(folder: Traversable, prefix: str) -> Iterator[tuple[str, bytes]]:
    for each in folder.iterdir():
        if each.is_file():
            yield prefix + each.name, each.read_bytes()
        else:
            yield from _files(each, f"{prefix}{each.name}/")


async def _index(request: Request, server: Server) -> Response:
    return _file("index.html")


async def _static(request: Request, server: Server) -> Response:
    return _file(request.path_params["name"])


def _file(name: str) -> Response:
    content = page_files().get(name)
    if content is None:
        raise RequestError(f"{shortened(name)}: no such file", status=404)
    kind = TYPES[name[name.rindex(".") :]]
    return Response(content, media_type=f"{kind}; charset=utf-8", headers=FILE_HEADERS)


async def _state(page: Page, request: Request, server: Server) -> Response:
    """The models, and the settings with which the page opens."""
    models = [_model(card) for card in await server.models.cards()]
    defaults = {"system": page.system, "settings": page.settings}
    return JSONResponse({"models": models, **defaults}, headers=HEADERS)


def _model(card: ModelCard) -> dict[str, object]:
    return {
        "name": card.name,
        "path": str(card.path.absolute()) if card.is_path and card.path is not None else None,
        "state": card.state,
        "context": card.context,
        "parameters": card.parameters,
        "bytes": card.loaded_bytes or card.size_bytes,
        "gpu_bytes": card.gpu_bytes,
    }


async def _plan(request: Request, server: Server) -> Response:
    """The memory plan of a model, null until it is loaded; `verdict`: its first line."""
    name = request.query_params.get("model", "")
    if name not in server.models.loaded:
        return JSONResponse({"plan": None}, headers=HEADERS)
    lease = await server.models.acquire(name)
    try:
        plan = await asyncio.to_thread(lambda: lease.model.plan)
    finally:
        lease.release()
    text = "another engine places the bytes" if plan is None else plan.explain()
    return JSONResponse({"plan": {"verdict": text.split("\n")[0], "text": text}}, headers=HEADERS)
