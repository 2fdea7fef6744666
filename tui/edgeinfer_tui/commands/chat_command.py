"""`edgeinfer chat`: the full-screen chat."""

import os
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import typer

from edgeinfer_tui import interrupts
from edgeinfer_tui.commands.run_command import check_model
from edgeinfer_tui.commands.web_chat import chat_in_browser
from edgeinfer_tui.confirmation import on_terminal
from edgeinfer_tui.failures import FAILED, report, say
from edgeinfer_tui.options import arguments
from edgeinfer_tui.options.command_options import command
from edgeinfer_tui.options.parsed_options import ParsedOptions, parsed_options
from edgeinfer_tui.options.settings import filled

if TYPE_CHECKING:
    from edgeinfer_tui.app.app import ChatApp

SWITCH_SECONDS = 0.0005
"""Thread switch interval while the screen draws. The model thread needs the interpreter several times per
token: with Python's default of 5 ms the built-in model lost about a fifth of its speed.
"""


@command("chat")
def chat(
    model: arguments.ModelArgument = None,
    light: bool = False,
    web: bool = False,
    **given: Any,
) -> None:
    """Chat in full screen.

    Responses are shown as Markdown while they are generated; Esc stops one.
    Messages can be edited, responses regenerated, and all of them are saved.
    F1 lists the keys.

    [bold]Examples[/]

      edgeinfer chat

      edgeinfer chat qwen3-8b --system "Be brief."

      edgeinfer chat --continue           [dim]# continue the last chat[/]

      edgeinfer chat --session foxes      [dim]# or the one of that name[/]

      edgeinfer chat --web                [dim]# in the browser[/]
    """
    options = parsed_options(filled({"model": model, **given}), "chat")
    if web:
        chat_in_browser(options, named=model is not None)
        return
    if not (on_terminal(sys.stdin) and on_terminal(sys.stdout)):
        raise typer.BadParameter("chat needs a terminal; for pipes and scripts there is: edgeinfer run")
    program = chat_program(options, named=model is not None, dark=not light)
    sys.setswitchinterval(SWITCH_SECONDS)
    program.run()
    if program.failure is not None:
        report(program.failure)
    if program.chat.lost is not None:
        say(f"the last part of this chat isn't on the disk: {program.chat.lost}")
    code = FAILED if program.failure is not None else program.return_code or 0
    if not program.at_rest:
        # The model thread can't be interrupted now; the whole chat is already saved.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    program.chat.thread.finish()
    raise typer.Exit(code)


def chat_program(options: ParsedOptions, named: bool, dark: bool) -> "ChatApp":
    """Create the application after checking its inputs."""
    from edgeinfer_tui.chat_session import open_store

    warnings: list[str] = []
    store = open_store(options, prompted=False, tell=warnings.append)
    stored = None if store is None else store.stored
    if stored is not None and not named:
        options = replace(options, model=stored.model)
    check_model(options)
    interrupts.raise_exception()

    from edgeinfer_tui.app.app import ChatApp

    if store is not None:
        options = replace(options, loading={**options.loading, "snapshots": True})
    return ChatApp(options, store, dark, warnings)
