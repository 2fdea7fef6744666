"""`edgeinfer config`: defaults of options, and where they are set."""

import json
from typing import Annotated, Any

import typer

from edgeinfer_tui.failures import FAILED, report, say
from edgeinfer_tui.options import arguments
from edgeinfer_tui.options.command_options import command
from edgeinfer_tui.output.columns import one_line, print_columns, print_pairs

HIDDEN = "(hidden)"


@command("config")
def config(
    path: Annotated[
        bool, typer.Option("--path", help="Only the settings file's path.", show_default=False)
    ] = False,
    as_json: arguments.AsJson = False,
) -> None:
    """Show every setting, its value, and its source.

    Settings are resolved in this order: command line, environment
    (EDGEINFER_CONTEXT=8192), settings file (context = 8192), default.

    [bold]Examples[/]

      edgeinfer config

      "${EDITOR:-vi}" "$(edgeinfer config --path)"
    """
    from edgeinfer_tui.options.settings import (
        config_file,
        configured_tool_servers,
        is_secret,
        setting_names,
        unknown_variables,
        valid_settings,
    )

    if path:
        print(config_file())
        return
    known, wrong = valid_settings()
    usual = _defaults()
    rows = []
    for name in setting_names():
        value = known[name].value if name in known else usual.get(name)
        if name in known and is_secret(name):
            value = HIDDEN
        rows.append((name, value, known[name].origin if name in known else "default"))
    if not wrong:
        rows += [
            (f"mcp.{server.name}", server.target, str(config_file())) for server in configured_tool_servers()
        ]
    _print(rows, as_json)
    unknown = unknown_variables()
    for remark in unknown:
        say(remark)
    for error in wrong:
        report(error)
    if unknown or wrong:
        raise typer.Exit(FAILED)


def _print(rows: list[tuple[str, Any, str]], as_json: bool) -> None:
    """Print (setting, value, origin), and the folders."""
    from edgeinfer_tui.options.settings import config_file

    if as_json:
        settings = {
            name: {"value": list(value) if isinstance(value, tuple) else value, "from": origin}
            for name, value, origin in rows
        }
        print(json.dumps({"settings": settings, "folders": dict(_folders())}, indent=2))
    else:
        file = config_file()
        print_columns(["SETTING", "VALUE", "FROM"], [(name, _shown(value), at) for name, value, at in rows])
        print()
        print_pairs([("settings file", f"{file}{'' if file.exists() else ' (not there)'}"), *_folders()])


def _defaults() -> dict[str, Any]:
    """The defaults of the options; None: chosen from the model and the machine."""
    from edgeinfer.registry.registry import BUILTIN_NAME
    from edgeinfer_tui.options.settings import MODEL, persistent_options

    return {MODEL: BUILTIN_NAME, **{name: option.default for name, option in persistent_options().items()}}


def _folders() -> list[tuple[str, str]]:
    from edgeinfer.registry.entries import user_registry
    from edgeinfer.registry.registry import default_models_folder
    from edgeinfer.user_folders import user_folder

    return [
        ("models", str(default_models_folder())),
        ("models of your own", str(user_registry())),
        ("compiled kernels, measurements", str(user_folder("cache"))),
        ("history", str(user_folder("state"))),
    ]


def _shown(value: Any) -> str:
    """The value as written in the file; "" for a value chosen later."""
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return one_line(value if isinstance(value, str) else json.dumps(value))
