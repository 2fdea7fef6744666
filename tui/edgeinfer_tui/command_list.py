"""The commands, and the text of `edgeinfer --help`."""

from collections.abc import Callable, Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer

from edgeinfer_tui.command_class import EdgeInferCommand, EdgeInferGroup
from edgeinfer_tui.options.command_options import Command
from edgeinfer_tui.options.option_errors import canonical

ORDER = (
    "run", "chat", "pull", "serve", "batch", "show", "list", "rm", "history", "embed", "rank",
    "plan", "quantize", "convert", "bench", "eval", "profile", "config", "doctor",
)  # fmt: skip
"""The commands in the order of `--help`; others follow by name."""

app = typer.Typer(
    cls=EdgeInferGroup,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": canonical},
)


def _print_version(requested: bool) -> None:
    if requested:
        from edgeinfer_tui.versions import version_of

        print(f"edgeinfer {version_of('edgeinfer')}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def edgeinfer(
    invocation: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Run a language model on your own machine.

    [bold]Start with[/]

      edgeinfer run tiny "Once upon a time"

    MODEL is a name from `edgeinfer list` or the path of a .gguf file;
    `edgeinfer pull` downloads more.
    """
    if invocation.invoked_subcommand is None:
        print(invocation.get_help())


def _commands() -> Iterator[tuple[str, Command]]:
    """Names and functions of the commands: what `@command` marks in the modules of `commands`."""
    root = Path(__file__).parent
    for file in sorted((root / "commands").rglob("*_command.py")):
        module = ".".join(file.relative_to(root.parent).with_suffix("").parts)
        for value in vars(import_module(module)).values():
            if name := getattr(value, "command_name", None):
                yield name, value


@cache
def command_line() -> Callable[..., Any]:
    """What runs the arguments of a command line. Typer would build all commands again for each one."""
    return typer.main.get_command(app)


for _name, _function in sorted(_commands(), key=lambda one: (*ORDER, one[0]).index(one[0])):
    app.command(_name, cls=EdgeInferCommand)(_function)
