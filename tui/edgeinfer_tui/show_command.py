"""`edgeinfer show`: what a model file holds."""

import json
from typing import Annotated

import typer

from edgeinfer_tui.failures import reporting


@reporting
def show(
    model: Annotated[
        str | None,
        typer.Argument(help="A name from `edgeinfer list`, or a .gguf file. [dim]tiny if left out[/]"),
    ] = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor as well.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")] = False,
) -> None:
    """Show what a model file holds: metadata, tensor types, sizes, parameters. Reads no weights.

    [bold]Examples[/]

      edgeinfer show tiny

      edgeinfer show ~/models/granite.gguf --tensors

      edgeinfer show tiny --json | jq .metadata
    """
    from edgeinfer.catalogue import find_model
    from edgeinfer_quant_formats import GGUFFile
    from edgeinfer_tui import file_report

    found = find_model(model)
    with GGUFFile.open(found.path) as file:
        report = file_report.file_report(file, found.name, found.size_bytes)
        if not tensors:
            del report["tensors"]
        if as_json:
            print(json.dumps(report, indent=2, allow_nan=False))
        else:
            file_report.print_report(report)
