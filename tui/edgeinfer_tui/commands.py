"""The commands, and what `edgeinfer --help` says of them."""

from typing import Annotated

import typer

from edgeinfer_tui import (
    bench_command,
    chat_command,
    chats_command,
    config_command,
    doctor_command,
    eval_command,
    list_command,
    plan_command,
    profile_command,
    pull_command,
    quantize_command,
    rm_command,
    run_command,
    serve_command,
    show_command,
)

app = typer.Typer(
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

    MODEL is a name from `edgeinfer list` or the path of a .gguf file;
    `edgeinfer pull` fetches more.
    """
    if invocation.invoked_subcommand is None:
        print(invocation.get_help())


app.command()(run_command.run)
app.command()(chat_command.chat)
app.command()(pull_command.pull)
app.command()(serve_command.serve)
app.command()(show_command.show)
app.command("list")(list_command.list_)
app.command()(rm_command.rm)
app.command()(chats_command.chats)
app.command()(plan_command.plan)
app.command()(quantize_command.quantize)
app.command()(bench_command.bench)
app.command("eval")(eval_command.eval_)
app.command()(profile_command.profile)
app.command()(config_command.config)
app.command()(doctor_command.doctor)
