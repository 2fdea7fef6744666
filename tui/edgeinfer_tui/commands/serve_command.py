"""`edgeinfer serve`: an OpenAI-compatible HTTP server for one model, until Ctrl-C."""

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Annotated, Any

from typer import Option

from edgeinfer_tui import interrupts, library
from edgeinfer_tui.failures import say
from edgeinfer_tui.options import arguments
from edgeinfer_tui.options.command_options import command
from edgeinfer_tui.options.parsed_options import parsed_options
from edgeinfer_tui.options.settings import filled
from edgeinfer_tui.output.columns import shown_bytes
from edgeinfer_tui.output.progress_line import BUILDING, ProgressLine

if TYPE_CHECKING:
    import socket

    from edgeinfer import Model

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
        help="Require this key, sent as a bearer token.",
        rich_help_panel=SERVER,
    ),
]
Queue = Annotated[int, Option("--queue", min=0, help="Requests that may wait.", rich_help_panel=SERVER)]


@command("serve")
def serve(
    model: arguments.ModelArgument = None,
    host: Host = "127.0.0.1",
    port: Port = 8080,
    key: Key = None,
    queue: Queue = 64,
    **given: Any,
) -> None:
    """Serve a model over HTTP with OpenAI's API.

    /v1/chat/completions, /v1/completions, /v1/embeddings, /v1/rerank and
    /v1/models; one completion at a time, other requests wait. A completion is cancelled
    if its client disconnects.

    [bold]Example[/]

      edgeinfer serve tiny

      curl http://127.0.0.1:8080/v1/chat/completions -H "Content-Type: application/json" \\
        -d '{"messages": [{"role": "user", "content": "Hi"}]}'
    """
    options = parsed_options(filled({"model": model, **given}), "serve")
    _check_installed()
    from edgeinfer_tui.system.listening import listening  # imports socket

    listener, all_interfaces = listening(host, port, key)
    reading = ProgressLine("loading the model", sys.stderr, shown=shown_bytes)
    building = ProgressLine(BUILDING, sys.stderr, at_once=True)
    try:
        loaded = library.load_model(options.model, options.loading, reading.update, building.update)
    finally:
        building.erase()
        reading.erase()
    with loaded, listener:
        for note in loaded.warnings:
            say(note)
        limits = queue, options.response_cache
        run_server(loaded, listener, all_interfaces, host, key, limits)  # type: ignore[arg-type]


def _check_installed() -> None:
    """Check the server packages before the model is loaded."""
    from importlib.util import find_spec

    from edgeinfer.errors import SettingError

    missing = [name for name in ("starlette", "uvicorn") if find_spec(name) is None]
    if missing:
        raise SettingError(
            f"serve: needs {' and '.join(missing)}, not installed here; pip install 'edgeinfer[serve]'"
        )


def run_server(
    model: "Model",
    listener: "socket.socket",
    all_interfaces: bool,
    host: str,
    key: str | None,
    limits: tuple[int, int],
) -> None:
    """Serve until Ctrl-C. `limits`: requests that may wait, and completions that are kept."""
    from edgeinfer.serving.app import ServerOptions, serving_app
    from edgeinfer.serving.transport.access import ANY_HOST, LOCAL_HOSTS
    from edgeinfer_tui.system.http_server import BoundedServer

    hosts = (ANY_HOST,) if all_interfaces else (*LOCAL_HOSTS, host)
    queue, kept = limits
    options = ServerOptions(key=key, max_waiting=queue, hosts=hosts, response_cache=kept)
    app = serving_app(model, options)
    shown, port = f"[{host}]" if ":" in host else host, listener.getsockname()[1]
    say(f"{model.name} is served at http://{shown}:{port}/v1 (Ctrl-C ends it)")
    interrupts.raise_exception()
    with suppress(KeyboardInterrupt):
        BoundedServer(app).run(sockets=[listener])
    say("ended")
