"""`edgeinfer serve`: an HTTP server with the APIs that programs use, until Ctrl-C."""

import sys
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

from typer import Argument, BadParameter, Option

from edgeinfer_tui import interrupts, library
from edgeinfer_tui.failures import say
from edgeinfer_tui.options import arguments
from edgeinfer_tui.options.command_options import command
from edgeinfer_tui.options.parsed_options import parsed_options
from edgeinfer_tui.options.settings import filled
from edgeinfer_tui.output.columns import shown_bytes
from edgeinfer_tui.output.progress_line import BUILDING, ProgressLine
from edgeinfer_tui.system.installed_packages import check_server_packages
from edgeinfer_tui.tool_servers import running_tool_servers

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Iterator, Mapping

    from edgeinfer.serving.models.models import Models as ServedModels
    from edgeinfer.tool_servers.client import ToolServers
    from edgeinfer_tui.options.parsed_options import ParsedOptions

SERVER = "The server"


Host = Annotated[
    str,
    Option(
        "--host",
        help="The address to listen on; 0.0.0.0: the whole network, which needs a --key.",
        rich_help_panel=SERVER,
    ),
]
Port = Annotated[int, Option("--port", min=0, max=65535, help="0: a free one.", rich_help_panel=SERVER)]
Key = Annotated[
    str | None,
    Option(
        "--key",
        envvar="EDGEINFER_SERVE_KEY",
        help="Require this key, sent as a bearer token or in x-api-key.",
        rich_help_panel=SERVER,
    ),
]
Models = Annotated[
    list[str] | None,
    Argument(
        metavar="MODEL",
        help="A name from `edgeinfer list`, or a .gguf file. None or several: any installed model, loaded on "
        "request. [dim](any)[/]",
        show_default=False,
        autocompletion=arguments.models_here,
    ),
]
KeepAlive = Annotated[
    str,
    Option(
        "--keep-alive",
        metavar="TIME",
        help="Of several models, unload an idle one after this time, as 5m; 0: at once, -1: never.",
        rich_help_panel=SERVER,
    ),
]
RequestLog = Annotated[
    bool,
    Option(
        "--request-log/--no-request-log",
        help="Print a line for each request, without its text.",
        rich_help_panel=SERVER,
    ),
]
ShowsPage = Annotated[
    bool,
    Option(
        "--page/--no-page", help="A chat for browsers at /, with the saved chats.", rich_help_panel=SERVER
    ),
]
HasTools = Annotated[
    bool,
    Option(
        "--mcp",
        help="Offer the tools of the settings file's MCP servers on the page; each call is confirmed there. "
        "Needs a --key.",
        show_default=False,
        rich_help_panel=SERVER,
    ),
]
Ray = Annotated[
    str | None,
    Option(
        "--ray",
        metavar="ADDRESS",
        help="Deploy replicas of MODEL on a Ray cluster: HOST:PORT of its head, or auto on one of its nodes.",
        rich_help_panel=SERVER,
    ),
]
Replicas = Annotated[
    int | None,
    Option(
        "--replicas",
        min=1,
        help="With --ray: the number of replicas. [dim](one for each node)[/]",
        show_default=False,
        rich_help_panel=SERVER,
    ),
]
Queue = Annotated[int, Option("--queue", min=0, help="Requests that may wait.", rich_help_panel=SERVER)]


@command("serve")
def serve(
    models: Models = None,
    host: Host = "127.0.0.1",
    port: Port = 8080,
    key: Key = None,
    queue: Queue = 64,
    keep_alive: KeepAlive = "5m",
    request_log: RequestLog = True,
    page: ShowsPage = True,
    mcp: HasTools = False,
    ray: Ray = None,
    replicas: Replicas = None,
    **given: Any,
) -> None:
    """Serve models over HTTP with the APIs of OpenAI, Anthropic and Ollama, and a chat for browsers.

    /v1/chat/completions, /v1/responses, /v1/completions, /v1/embeddings,
    /v1/rerank, /v1/messages, /api/chat, /api/generate and others. With one
    MODEL it is loaded at once. Without one, or with several, any installed
    model is loaded on request, and unloaded if it is idle or memory is needed.
    On the CPU several requests are answered together (--parallel), others
    wait. A completion is cancelled if its client disconnects.

    [bold]Example[/]

      edgeinfer serve tiny

      curl http://127.0.0.1:8080/v1/chat/completions -H "Content-Type: application/json" \\
        -d '{"messages": [{"role": "user", "content": "Hi"}]}'
    """
    one = models[0] if models and len(models) == 1 else None
    options = parsed_options(filled({"model": one, **given}), "serve")
    options = replace(options, loading={"parallel": 0, **options.loading})
    if library.is_remote(options.loading):
        raise BadParameter("--engine openai: its server answers programs itself; give another --engine")
    check_server_packages("serve", "uvicorn")
    if ray is not None or replicas is not None:
        from edgeinfer_tui.commands.ray_server import serve_on_cluster

        serve_on_cluster(ray, models or [], options, (host, port), ServerLimits(key, queue), replicas)
        return
    from edgeinfer_tui.system.listening import listening  # imports socket

    if mcp and not page:
        raise BadParameter("--mcp is for the page, which --no-page leaves out; drop one of them")
    if mcp and key is None:
        raise BadParameter("--mcp: any program of this machine could call the tools; give a --key too")
    seconds = _seconds(keep_alive)
    listener, all_interfaces = listening(host, port, key)
    limits = ServerLimits(key, queue, options.response_cache, request_log, page)
    with (
        listener,
        running_tool_servers() if mcp else nullcontext() as tools,
        _models(models or [], options, seconds) as served,
    ):
        run_server(served, listener, all_interfaces, host, replace(limits, tools=tools))


def _seconds(keep_alive: str) -> float | None:
    from edgeinfer.errors import SettingError
    from edgeinfer.serving.models.keep_alive import keep_alive_of

    try:
        return keep_alive_of(keep_alive)
    except SettingError as error:
        raise BadParameter(str(error).replace("keep_alive", "--keep-alive", 1)) from error


@dataclass(frozen=True)
class ServerLimits:
    """Options of the server: its key, requests that may wait, completions that are kept, the log, and whether
    it has the chat page, which offers tools, and opens with a system prompt and generation settings.
    """

    key: str | None = None
    queue: int = 64
    response_cache: int = 0
    request_log: bool = True
    page: bool = True
    tools: "ToolServers | None" = None
    system: str | None = None
    settings: "Mapping[str, Any]" = field(default_factory=dict)


@contextmanager
def _models(names: list[str], options: "ParsedOptions", keep_alive: float | None) -> "Iterator[ServedModels]":
    """One model, which is loaded now, or any installed one on request."""
    from edgeinfer.serving.models.installed import InstalledModels
    from edgeinfer.serving.models.pool import ModelPool

    if len(names) == 1 or options.model is not None:
        with one_model(options) as loaded:
            yield loaded
        return
    installed = InstalledModels(names, options.loading, say)
    default = installed.given[0] if names else ""
    yield ModelPool(installed, -1 if keep_alive is None else keep_alive, default)


@contextmanager
def one_model(options: "ParsedOptions") -> "Iterator[ServedModels]":
    """The model that the options name, loaded; it is closed at the end."""
    from edgeinfer.registry.registry import find_model
    from edgeinfer.serving.models.models import OneModel

    reading = ProgressLine("loading the model", sys.stderr, shown=shown_bytes)
    building = ProgressLine(BUILDING, sys.stderr, at_once=True)
    try:
        loaded = library.load_model(options.model, options.loading, reading.update, building.update)
    finally:
        building.erase()
        reading.erase()
    with loaded:
        for note in loaded.warnings:
            say(note)
        yield OneModel(loaded, find_model(options.model))  # type: ignore[arg-type]


def run_server(
    models: "ServedModels",
    listener: "socket.socket",
    all_interfaces: bool,
    host: str,
    limits: ServerLimits,
    opened: "Callable[[str], None] | None" = None,
) -> None:
    """Serve until Ctrl-C. `opened`: called with the address of the page once requests are accepted."""
    from edgeinfer.serving.app import ServerOptions, serving_app
    from edgeinfer.serving.page.page import Page
    from edgeinfer.serving.transport.access import ANY_HOST, LOCAL_HOSTS
    from edgeinfer_tui.system.http_server import BoundedServer

    page = Page(system=limits.system, settings=limits.settings, tools=limits.tools) if limits.page else None
    hosts = (ANY_HOST,) if all_interfaces else (*LOCAL_HOSTS, host)
    options = ServerOptions(
        key=limits.key,
        max_waiting=limits.queue,
        hosts=hosts,
        response_cache=limits.response_cache,
        log=say if limits.request_log else _no_log,
        page=page,
    )
    shown, port = f"[{host}]" if ":" in host else host, listener.getsockname()[1]
    of = " and ".join(models.loaded) if models.loaded else "any installed model"
    say(f"{of} is served at http://{shown}:{port}/v1 (Ctrl-C ends it)")
    address = f"http://{shown}:{port}/"
    if limits.page and opened is None:
        say(f"a chat for browsers is at {address}")
    interrupts.raise_exception()
    with suppress(KeyboardInterrupt):
        server = BoundedServer(serving_app(models, options))
        if opened is not None:
            opened(address)  # the socket listens already: a request waits until the server has started
        server.run(sockets=[listener])
    say("ended")


def _no_log(line: str) -> None:
    """No log of requests."""
