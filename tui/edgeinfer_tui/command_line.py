"""The command line: `edgeinfer COMMAND`."""

import sys
from typing import Annotated, NoReturn

import typer

from edgeinfer_tui import doctor_command, list_command, run_command, show_command
from edgeinfer_tui.failures import INTERRUPTED, WRONG_USAGE, is_usage_error, report, say

app = typer.Typer(
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
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
    """Run a language model on the machine in front of you.

    [bold]Start with[/]

      edgeinfer run tiny "Once upon a time"

    MODEL is a name from `edgeinfer list` or the path of a .gguf file.
    """
    if invocation.invoked_subcommand is None:
        print(invocation.get_help())


app.command()(run_command.run)
app.command()(show_command.show)
app.command("list")(list_command.list_)
app.command()(doctor_command.doctor)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command line and leave the process with its exit code."""
    code = exit_code(arguments)
    try:
        sys.stdout.flush()
    except BrokenPipeError as error:
        code = report(error)
    sys.exit(code)


def exit_code(arguments: list[str] | None = None) -> int:
    """Run the command line; every failure ends in one line on stderr."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # A terminal that can't show a character shows a mark, and the answer goes on.
            stream.reconfigure(errors="replace")
    try:
        code = app(args=arguments, prog_name="edgeinfer", standalone_mode=False)
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except Exception as error:
        if not is_usage_error(error):
            return report(error)
        say(f"{_usage_text(error)} (see {_command_of(error)} --help)")
        code = WRONG_USAGE
    return code if isinstance(code, int) else 0


def _usage_text(error: Exception) -> str:
    """What is wrong with the command line, on one line."""
    message: str = error.format_message()  # type: ignore[attr-defined]
    return " ".join(message.split()).removeprefix("Invalid value: ").removesuffix(".")


def _command_of(error: Exception) -> str:
    """The command whose usage was wrong, as it is typed."""
    context = getattr(error, "ctx", None)
    return "edgeinfer" if context is None else str(context.command_path)
