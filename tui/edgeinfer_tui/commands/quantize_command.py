"""`edgeinfer quantize`: convert a model file to smaller formats."""

import json
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from typer import BadParameter

from edgeinfer_tui import interrupts
from edgeinfer_tui.failures import resumable, say
from edgeinfer_tui.options import quantize_options as own
from edgeinfer_tui.options.command_options import command
from edgeinfer_tui.output.columns import shown_bytes
from edgeinfer_tui.output.labelled_progress import LabelledProgress
from edgeinfer_tui.text_files import text_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from edgeinfer.quantizing import Quantization


@command("quantize", help=own.HELP)
def quantize(
    model: own.Source,
    target: own.Target = None,
    type: own.TypeName = None,
    hot_first: own.HotFirst = False,
    bundle: own.Bundle = False,
    imatrix: own.Imatrix = None,
    fit: own.Fit = None,
    bpw: own.BitsPerWeight = None,
    tokens_per_second: own.TokensPerSecond = None,
    text: own.Text = None,
    calibrate: own.Calibrate = None,
    tensor: own.TensorTypes = None,
    output_type: own.OutputType = None,
    embedding_type: own.EmbeddingType = None,
    pure: own.Pure = False,
    allow_requantize: own.AllowRequantize = False,
    threads: int | None = None,
    force: own.Force = False,
    dry_run: own.DryRun = False,
    as_json: own.AsJson = False,
) -> None:
    from edgeinfer.quantizing import quantize as quantize_file

    overrides = own.overrides(tensor or [])
    if bundle and target is None and not dry_run:
        _write_bundles(model)
        return
    _check_usage(type, target, dry_run)
    keeps_work = not dry_run and (calibrate or fit or bpw or tokens_per_second)
    done = _with_progress(
        "quantizing",
        quantize_file,
        "edgeinfer quantize" if keeps_work else "",
        model,
        target,
        type,
        hot_first=hot_first,
        importance=imatrix,
        fit=fit,
        bits_per_weight=bpw,
        tokens_per_second=tokens_per_second,
        text=text_of(text) if text else None,
        calibrate=text_of(calibrate, "--calibrate") if calibrate else None,
        overrides=overrides,
        pure=pure,
        output_type=output_type,
        embedding_type=embedding_type,
        threads=threads,
        allow_requantize=allow_requantize,
        overwrite=force,
        dry_run=dry_run,
    )
    _print(done, as_json, dry_run)
    if bundle and target is not None and not dry_run:
        _write_bundles(target)


def _write_bundles(model: str | Path) -> None:
    from edgeinfer.bundling import bundle_neurons

    interrupts.raise_exception()
    path = bundle_neurons(model)
    say(f"{path}: {shown_bytes(path.stat().st_size)} of neurons in bundles")


def _check_usage(type: str | None, target: Path | None, dry_run: bool) -> None:
    from edgeinfer_quant_formats.errors import FormatError
    from edgeinfer_quant_formats.quantizer.mixes import find_mix

    try:
        find_mix(type or "Q4_K_M")
    except FormatError as error:
        raise BadParameter(f"--type: {error}") from None
    if target is None and not dry_run:
        raise BadParameter("OUT is missing: the file to write; or use --dry-run to see what would be written")


@command("convert", help=own.CONVERT_HELP)
def convert(
    folder: own.Folder,
    target: own.Target = None,
    type: own.ConvertedType = None,
    imatrix: own.Imatrix = None,
    tensor: own.TensorTypes = None,
    output_type: own.OutputType = None,
    embedding_type: own.EmbeddingType = None,
    allow_requantize: own.AllowRequantize = False,
    threads: int | None = None,
    force: own.Force = False,
    dry_run: own.DryRun = False,
    as_json: own.AsJson = False,
) -> None:
    from edgeinfer.quantizing import convert as convert_folder

    overrides = own.overrides(tensor or [])
    _check_usage(type, target, dry_run)
    done = _with_progress(
        "converting",
        convert_folder,
        "",
        folder,
        target,
        type,
        importance=imatrix,
        overrides=overrides,
        output_type=output_type,
        embedding_type=embedding_type,
        threads=threads,
        allow_requantize=allow_requantize,
        overwrite=force,
        dry_run=dry_run,
    )
    _print(done, as_json, dry_run)


def _with_progress(
    label: str, write: "Callable[..., Quantization]", resumed_by: str, *places: Any, **settings: Any
) -> "Quantization":
    """The result of a function that writes a file, with a progress line. `resumed_by`: the command that
    resumes after Ctrl-C; empty: nothing is kept.
    """
    interrupts.raise_exception()
    kept = resumable(resumed_by) if resumed_by else nullcontext()
    with kept, LabelledProgress(time_left=True) as progress:
        return write(*places, **settings, progress=progress.step(label, shown_bytes), report=progress.update)


def _print(done: "Quantization", as_json: bool, dry_run: bool) -> None:
    from edgeinfer_tui.output.quantize_report import print_table, quantize_report, summary

    for note in done.warnings:
        say(note)
    report = quantize_report(done)
    if as_json:
        print(json.dumps(report, indent=2, allow_nan=False))
    elif dry_run:
        print_table(report)
    else:
        say(summary(report))
