"""`edgeinfer show`: contents of a model file."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from edgeinfer_tui.failures import reporting, say
from edgeinfer_tui.options.completion import models_to_pull
from edgeinfer_tui.output.byte_sizes import shown_bytes
from edgeinfer_tui.output.columns import print_pairs

if TYPE_CHECKING:
    from edgeinfer.errors import NotPulledError


@reporting
def show(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A name from `edgeinfer list`, or a .gguf file. [dim]tiny if left out[/]",
            autocompletion=models_to_pull,
        ),
    ] = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor as well.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")] = False,
) -> None:
    """Show the contents of a model file: metadata, tensor types, sizes, parameters. Reads no weights.

    For a model that isn't on this disk yet, show its registry entry.

    [bold]Examples[/]

      edgeinfer show tiny

      edgeinfer show ~/models/granite.gguf --tensors

      edgeinfer show tiny --json | jq .metadata
    """
    from edgeinfer.errors import NotPulledError
    from edgeinfer.model_config.support import model_support, open_model
    from edgeinfer.registry.registry import find_model
    from edgeinfer_tui.output import file_report

    try:
        found = find_model(model)
    except NotPulledError as missing:
        _show_entry(missing, as_json)
        return
    with open_model(found.path, found.name) as file:
        report = file_report.file_report(file, found.name, found.size_bytes, str(model_support(file)))
        if not tensors:
            del report["tensors"]
        if as_json:
            print(json.dumps(report, indent=2, allow_nan=False))
        else:
            file_report.print_report(report)


def _show_entry(missing: "NotPulledError", as_json: bool) -> None:
    """Print the registry entry of a model whose files aren't on this disk."""
    from edgeinfer.registry.registry import read_catalogue

    entry = read_catalogue()[missing.name.partition(":")[0]]
    lines = [
        ("name", entry.name),
        ("parameters", entry.parameters),
        ("context", str(entry.context or "")),
        ("licence", entry.licence),
        ("from", entry.url or f"hf:{entry.repository}"),
        ("draft", entry.draft or ""),
        ("good for", entry.notes),
    ]
    files = []
    for quant in entry.quants:
        size, digest = entry.size_bytes.get(quant), entry.sha256.get(quant)
        files.append({"type": quant, "file": entry.file_of(quant), "size_bytes": size, "sha256": digest})
        known = [shown_bytes(size) if size else "", f"sha256 {digest}" if digest else ""]
        lines.append((quant or "file", ", ".join(filter(None, [entry.file_of(quant), *known]))))
    if as_json:
        facts: dict[str, object] = {name.replace(" ", "_"): value or None for name, value in lines[:7]}
        print(json.dumps({**facts, "files": files, "here": False}, indent=2))
    else:
        print_pairs([(name, value) for name, value in lines if value])
    say(str(missing))
