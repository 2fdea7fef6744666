"""`edgeinfer chat --web`: a server on this machine for one user, and its page in the browser."""

import os
import secrets
import threading
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from typer import BadParameter

from edgeinfer_tui import library
from edgeinfer_tui.commands import serve_command
from edgeinfer_tui.commands.run_command import check_model
from edgeinfer_tui.failures import say
from edgeinfer_tui.options.parsed_options import ParsedOptions
from edgeinfer_tui.options.settings import configured_tool_servers
from edgeinfer_tui.system.installed_packages import check_server_packages
from edgeinfer_tui.system.terminal_calls import has_display
from edgeinfer_tui.tool_servers import running_tool_servers

if TYPE_CHECKING:
    import socket

HOST, PORT = "127.0.0.1", 8080
KEY_BYTES = 24


def chat_in_browser(options: ParsedOptions, named: bool) -> None:
    """Serve the page until Ctrl-C, and open it. `named`: the command line names the model.

    The page's address has a random key, so that other users of this machine can't read the chats.
    """
    from edgeinfer_tui.chat_session import open_store

    if options.private:
        raise BadParameter("--private saves no chat, but the page saves all; drop --private or --web")
    if library.is_remote(options.loading):
        raise BadParameter("--web has the models of this machine; drop it, or --engine openai")
    check_server_packages("chat --web", "uvicorn")
    settings = _settings(options.generation)
    store = open_store(options, prompted=False)
    if store is not None and store.stored is not None and not named:
        options = replace(options, model=store.stored.model)
    check_model(options)
    chat = _chat(options) if options.session is not None or options.resume else None
    key = secrets.token_urlsafe(KEY_BYTES)
    limits = serve_command.ServerLimits(key, request_log=False, system=options.system, settings=settings)
    has_tools = options.mcp and bool(configured_tool_servers())
    with (
        _listener() as listener,
        running_tool_servers() if has_tools else nullcontext() as tools,
        serve_command.one_model(options) as models,
    ):
        limits = replace(limits, tools=tools)
        fragment = f"#key={key}" + ("" if chat is None else f"&chat={chat}")
        serve_command.run_server(
            models, listener, False, HOST, limits, lambda address: _open(address + fragment)
        )


def _settings(generation: Mapping[str, Any]) -> dict[str, Any]:
    """Generation options as fields of requests. Raises `BadParameter` for others."""
    from edgeinfer.serving.fields import SAMPLING

    for name in generation:
        if name not in (*SAMPLING, "max_tokens"):
            raise BadParameter(f"--{name.replace('_', '-')}: not for the page; drop it or --web")
    return dict(generation)


def _chat(options: ParsedOptions) -> int:
    """The id of the chat to continue, which is created if there is none of its name."""
    from edgeinfer.history.store import ChatStore
    from edgeinfer_tui.chat_session import stored_model_name

    with ChatStore() as store:
        if options.session is None:
            return store.chats(1)[0].id
        if store.has(options.session):
            return store.chat(options.session).id
        return store.new_chat(stored_model_name(options.model), options.system, options.session).id


def _listener() -> "socket.socket":
    """A socket on the usual port, on which the browser keeps the page's theme, or on a free one."""
    from edgeinfer.errors import SettingError
    from edgeinfer_tui.system.listening import listening

    try:
        return listening(HOST, PORT, None)[0]
    except SettingError:
        return listening(HOST, 0, None)[0]


def _open(address: str) -> None:
    """Open the browser without waiting for it, and print the address."""
    say(f"the chat is at {address}")
    if has_browser(os.environ):
        import webbrowser

        threading.Thread(target=webbrowser.open, args=(address,), daemon=True).start()


def has_browser(environment: Mapping[str, str]) -> bool:
    """Whether a graphical browser can be opened; one of the terminal would hide the server's messages."""
    if not has_display(environment):
        return False
    import webbrowser

    try:
        webbrowser.get()
    except webbrowser.Error:
        return False
    return True
