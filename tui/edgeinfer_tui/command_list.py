"""The commands, and the text of `edgeinfer --help`."""

from typing import Annotated

import typer

from edgeinfer_tui.command_class import EdgeInferCommand, EdgeInferGroup
from edgeinfer_tui.commands import (
    bench_command,
    chat_command,
    config_command,
    doctor_command,
    eval_command,
    history_command,
    models_command,
    plan_command,
    profile_command,
    pull_command,
    quantize_command,
    run_command,
    serve_command,
)
from edgeinfer_tui.options.option_errors import canonical

app = typer.Typer(
    cls=EdgeInferGroup,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "token_normalize_func": canonical},
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
    """Run a language model on your own machine.

    [bold]Start with[/]

      edgeinfer run tiny "Once upon a time"

    MODEL is a name from `edgeinfer list` or the path of a .gguf file;
    `edgeinfer pull` downloads more.
    """
    if invocation.invoked_subcommand is None:
        print(invocation.get_help())


app.command(cls=EdgeInferCommand)(run_command.run)
app.command(cls=EdgeInferCommand)(chat_command.chat)
app.command(cls=EdgeInferCommand)(pull_command.pull)
app.command(cls=EdgeInferCommand)(serve_command.serve)
app.command(cls=EdgeInferCommand)(models_command.show)
app.command("list", cls=EdgeInferCommand)(models_command.list_)
app.command(cls=EdgeInferCommand)(models_command.rm)
app.command(cls=EdgeInferCommand)(history_command.history)
app.command(cls=EdgeInferCommand)(plan_command.plan)
app.command(cls=EdgeInferCommand)(quantize_command.quantize)
app.command(cls=EdgeInferCommand)(bench_command.bench)
app.command("eval", cls=EdgeInferCommand)(eval_command.eval_)
app.command(cls=EdgeInferCommand)(profile_command.profile)
app.command(cls=EdgeInferCommand)(config_command.config)
app.command(cls=EdgeInferCommand)(doctor_command.doctor)
