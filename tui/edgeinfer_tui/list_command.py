"""`edgeinfer list`: the models that are on this machine."""

import json
from typing import TYPE_CHECKING, Annotated

import typer

from edgeinfer_tui.byte_sizes import shown_bytes
from edgeinfer_tui.columns import print_columns
from edgeinfer_tui.failures import reporting

if TYPE_CHECKING:
    from edgeinfer.catalogue import ModelFile


@reporting
def list_(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")] = False,
) -> None:
    """List the models on this machine: the built-in one and those in your models folder."""
    from edgeinfer.catalogue import default_models_folder, list_models

    models = list_models()
    if as_json:
        print(json.dumps([_fields(model) for model in models], indent=2))
        return
    rows = [
        [
            model.name,
            model.parameters,
            shown_bytes(model.size_bytes),
            model.source,
            model.notes or str(model.path),
        ]
        for model in models
    ]
    print_columns(["NAME", "PARAMETERS", "SIZE", "FROM", "NOTES"], rows, right={1, 2})
    print(f"\nYour own .gguf files are found by name in {default_models_folder()}")


def _fields(model: "ModelFile") -> dict[str, object]:
    return {
        "name": model.name,
        "path": str(model.path),
        "source": model.source,
        "size_bytes": model.size_bytes,
        "draft_path": None if model.draft_path is None else str(model.draft_path),
        "parameters": model.parameters or None,
        "context": model.context,
        "licence": model.licence or None,
        "notes": model.notes or None,
    }
