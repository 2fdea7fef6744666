"""`edgeinfer list`, `show` and `rm`: the models on this machine, and those that can be pulled."""

import json
import shutil
import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from edgeinfer_tui.confirmation import Yes, confirm_removal, on_terminal
from edgeinfer_tui.failures import say
from edgeinfer_tui.options import arguments
from edgeinfer_tui.options.command_options import command
from edgeinfer_tui.output.columns import print_columns, print_pairs, shown_bytes
from edgeinfer_tui.output.labelled_progress import LabelledProgress
from edgeinfer_tui.output.progress_line import shown_ago

if TYPE_CHECKING:
    from edgeinfer.errors import NotPulledError
    from edgeinfer.registry.model_listing import ListedModel
    from edgeinfer.registry.registry_listing import ListedEntry
    from edgeinfer.registry.removing import Removal

HEAD = ["NAME", "PARAMETERS", "TYPE", "SIZE", "LAST USED", "FITS", "FROM", "NOTES"]
ASSUMED = "speeds assume 20 GB/s of memory: this machine isn't measured yet; edgeinfer plan MODEL measures it"
ALL_HEAD = ["NAME", "SIZE", "FITS", "TOKENS/S", "HERE", "NOTES"]


@command("list")
def list_(
    everything: Annotated[
        bool,
        typer.Option("--all", "-a", help="List models that can be pulled.", show_default=False),
    ] = False,
    device: Annotated[
        str | None,
        typer.Option(
            "--device", help='Another machine, as "rtx 4060 laptop, 32GiB ram".', show_default=False
        ),
    ] = None,
    as_json: arguments.AsJson = False,
) -> None:
    """List the models on this machine: built in, pulled, in your models folder, or from other programs.

    FITS: whether a model with its default context fits the memory that is
    free now, and the speed that `edgeinfer plan` predicts. Models of Ollama,
    LM Studio, llama.cpp and the Hugging Face cache are used in place.

    With --all, the models that run well here come first: those of 15 tokens/s
    or more, then slower ones, encoders, unknown ones, and those that don't
    fit; of each, the newest first. Sizes and speeds are those of Q4_K_M.
    """
    from edgeinfer.planning.fit import known_machine, measure_usual_formats
    from edgeinfer.planning.model_plan import described_machine
    from edgeinfer.registry.model_listing import listed
    from edgeinfer.registry.registry import default_models_folder, list_models, read_registry
    from edgeinfer.registry.registry_listing import listed_registry

    if everything and not device:
        measure_usual_formats()
    machine = described_machine(device) if device else known_machine()
    models = list_models()
    if everything:
        with LabelledProgress() as progress:
            entries = listed_registry(read_registry(), models, machine, progress.step("planning the models"))
        _print_registry(entries, as_json)
        if machine.origin == "unmeasured":
            say(ASSUMED)
        return
    listed_models = [listed(model, machine) for model in models]
    if as_json:
        print(json.dumps([_fields(one) for one in listed_models], indent=2, allow_nan=False))
        return
    print_columns(HEAD, [_row(one) for one in listed_models], right={1, 3})
    print(f"\nModels are pulled to {default_models_folder()}; your own .gguf files are found there by name.")


def _row(listed: "ListedModel") -> list[str]:
    model = listed.model
    return [
        model.name,
        model.parameters,
        listed.quant,
        shown_bytes(model.size_bytes),
        "never" if model.last_used is None else shown_ago(time.time() - model.last_used),
        _fits(listed),
        model.source,
        model.notes or str(model.path),
    ]


def _fits(listed: "ListedModel") -> str:
    from edgeinfer.model_config.support import NEEDS_LLAMA_CPP

    if listed.support is not None and not listed.support.is_native:
        return NEEDS_LLAMA_CPP
    if listed.fit is None:
        return "?"
    if not listed.fit.fits:
        return "no"
    speed = listed.fit.tokens_per_second
    return "yes" if speed is None else f"yes, ~{speed:.0f} t/s" if speed >= 1 else "yes, slowly"


def _print_registry(entries: "list[ListedEntry]", as_json: bool) -> None:
    if as_json:
        print(json.dumps([_entry_fields(one) for one in entries], indent=2, allow_nan=False))
        return
    width = shutil.get_terminal_size().columns if on_terminal(sys.stdout) else None
    print_columns(ALL_HEAD, [_entry_row(one) for one in entries], right={1, 3}, width=width)
    print(
        "\nBest first. ~: approximate, -: unknown. More: edgeinfer show NAME, plan NAME\n"
        "Fetch one with: edgeinfer pull NAME, or NAME:QUANT as in qwen3-8b:Q6_K"
    )


def _entry_row(one: "ListedEntry") -> list[str]:
    from edgeinfer_offload.report.plan_verdict import PLACEMENTS, shown_rate

    size = "-" if one.size_bytes is None else ("~" if one.is_computed else "") + shown_bytes(one.size_bytes)
    fits = "-" if one.fit is None else PLACEMENTS.get(one.fit.placement or "", "no")
    assumed = "~" if one.fit is not None and one.fit.is_assumed else ""
    speed = "-" if one.speed is None else assumed + shown_rate(one.speed, digits=2)
    return [one.entry.name, size, fits, speed, "yes" if one.here else "", one.entry.notes]


def _entry_fields(one: "ListedEntry") -> dict[str, object]:
    entry, fit = one.entry, one.fit
    return {
        "name": entry.name,
        "repository": entry.repository,
        "url": entry.url,
        "files": {quant: entry.file_of(quant) for quant in entry.quants},
        "size_bytes": dict(entry.size_bytes),
        "sha256": dict(entry.sha256),
        "draft": entry.draft,
        "parameters": entry.parameters or None,
        "context": entry.context,
        "licence": entry.licence or None,
        "released": entry.released or None,
        "kind": entry.kind,
        "shape": entry.shape or None,
        "notes": entry.notes or None,
        "sparsity": entry.sparsity or None,
        "here": one.here is not None,
        "type": one.quant or None,
        "type_size_bytes": one.size_bytes,
        "size_is_computed": one.is_computed,
        "fits": None if fit is None else fit.fits,
        "placement": None if fit is None else fit.placement,
        "memory_bytes": None if fit is None else fit.nbytes,
        "tokens_per_second": one.speed,
        "speed_is_assumed": None if fit is None else fit.is_assumed,
    }


def _fields(listed: "ListedModel") -> dict[str, object]:
    model, fit = listed.model, listed.fit
    return {
        "name": model.name,
        "path": str(model.path),
        "source": model.source,
        "type": listed.quant or None,
        "size_bytes": model.size_bytes,
        "last_used": model.last_used,
        "runs_with": None if listed.support is None else str(listed.support),
        "fits": None if fit is None else fit.fits,
        "placement": None if fit is None else fit.placement,
        "memory_bytes": None if fit is None else fit.nbytes,
        "tokens_per_second": None if fit is None else fit.tokens_per_second,
        "draft_path": None if model.draft_path is None else str(model.draft_path),
        "parameters": model.parameters or None,
        "context": model.context,
        "licence": model.licence or None,
        "notes": model.notes or None,
    }


ShownModel = Annotated[
    str | None,
    typer.Argument(
        help="A name from `edgeinfer list`, or a .gguf file. [dim](tiny)[/]",
        autocompletion=arguments.models_to_pull,
    ),
]


@command("show")
def show(
    model: ShownModel = None,
    tensors: Annotated[bool, typer.Option("--tensors", help="List every tensor as well.")] = False,
    as_json: arguments.AsJson = False,
) -> None:
    """Show the contents of a model file: metadata, tensor types, sizes, parameters. Reads no weights.

    For a model that isn't on this disk yet, show its registry entry.

    [bold]Examples[/]

      edgeinfer show tiny

      edgeinfer show ~/models/granite.gguf --tensors

      edgeinfer show tiny --json | jq .metadata
    """
    from edgeinfer.errors import NotPulledError
    from edgeinfer.model_config.support import model_support, open_listed, recurrent_layers
    from edgeinfer.registry.draft_siblings import draft_siblings
    from edgeinfer.registry.registry import find_model
    from edgeinfer_tui.output import file_report

    try:
        model_file = find_model(model)
    except NotPulledError as missing:
        _show_entry(missing, as_json)
        return
    with open_listed(model_file.path) as file:
        support = model_support(file)
        report = file_report.file_report(
            file,
            model_file.name,
            model_file.size_bytes,
            str(support),
            recurrent_layers(file),
            model_file.sampling,
            [path.name for path in draft_siblings(model_file.path)] if support.is_model else (),
        )
        if not tensors:
            del report["tensors"]
        if as_json:
            print(json.dumps(report, indent=2, allow_nan=False))
        else:
            file_report.print_report(report)


def _show_entry(missing: "NotPulledError", as_json: bool) -> None:
    """Print the registry entry of a model whose files aren't on this disk."""
    from edgeinfer.registry.registry import read_registry
    from edgeinfer_tui.output import file_report

    entry = read_registry()[missing.name.partition(":")[0]]
    lines = [
        ("name", entry.name),
        ("parameters", entry.parameters),
        ("context", str(entry.context or "")),
        ("licence", entry.licence),
        ("from", entry.url or f"hf:{entry.repository}"),
        ("draft", entry.draft or ""),
        ("good for", entry.notes),
        ("sparsity", entry.sparsity),
        ("sampling", file_report.shown_sampling(entry.sampling)),
    ]
    files = []
    for quant in entry.quants:
        size, digest = entry.size_bytes.get(quant), entry.sha256.get(quant)
        files.append({"type": quant, "file": entry.file_of(quant), "size_bytes": size, "sha256": digest})
        known = [shown_bytes(size) if size else "", f"sha256 {digest}" if digest else ""]
        lines.append((quant or "file", ", ".join(filter(None, [entry.file_of(quant), *known]))))
    if as_json:
        facts: dict[str, object] = {name.replace(" ", "_"): value or None for name, value in lines[:8]}
        facts["sampling"] = dict(entry.sampling)
        print(json.dumps({**facts, "files": files, "here": False}, indent=2))
    else:
        print_pairs([(name, value) for name, value in lines if value])
    say(str(missing))


@command("rm")
def rm(
    models: Annotated[
        list[str],
        typer.Argument(
            metavar="MODEL...",
            help="Names of `edgeinfer list`.",
            show_default=False,
            autocompletion=arguments.models_here,
        ),
    ],
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print what would be removed.", show_default=False)
    ] = False,
    yes: Yes = False,
) -> None:
    """Remove models that were pulled or are in your models folder.

    Files of other programs (Ollama, LM Studio, the Hugging Face cache) are not
    removed: the message says how to remove them with those programs.

    [bold]Example[/]

      edgeinfer rm qwen3-8b:Q8_0
    """
    from edgeinfer.registry.removing import plan_removal, remove

    # All names are checked before the first removal: a misspelt name removes nothing.
    planned = [plan_removal(model) for model in models]
    for removal in planned:
        _print_kept_bytes(removal)
        question = f"Remove {removal.name}, {shown_bytes(removal.freed_bytes)}?"
        if not dry_run and not confirm_removal(question, yes):
            say(f"{removal.name}: kept")
            continue
        if not dry_run:
            remove(removal)
        what = "would free" if dry_run else "removed, freed"
        say(f"{removal.name}: {what} {shown_bytes(removal.freed_bytes)}")
        for file in removal.files:
            print(file)


def _print_kept_bytes(removal: "Removal") -> None:
    """Say what keeps the bytes of a removed model."""
    for other in removal.shared_with:
        say(f"{removal.name}: {other} uses the same file")
    if removal.hard_links:
        links = "a hard link keeps" if removal.hard_links == 1 else f"{removal.hard_links} hard links keep"
        say(f"{removal.name}: {links} its bytes on the disk")
