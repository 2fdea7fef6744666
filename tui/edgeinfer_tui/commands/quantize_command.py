"""`edgeinfer quantize`: convert a model file to smaller formats."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Argument, BadParameter, Option

from edgeinfer_tui import interrupts
from edgeinfer_tui.failures import say
from edgeinfer_tui.options.command_options import command
from edgeinfer_tui.output.columns import shown_bytes
from edgeinfer_tui.output.progress_line import ProgressLine

if TYPE_CHECKING:
    from edgeinfer.quantizing import Quantization

FORMATS = "Formats"
WORK = "Conversion"


@command("quantize")
def quantize(
    model: Annotated[
        str,
        Argument(metavar="IN", help="The F32, F16 or BF16 .gguf file, or a name from `edgeinfer list`."),
    ],
    target: Annotated[
        Path | None,
        Argument(metavar="OUT", help="The .gguf file to write. [dim]Not needed for --dry-run[/]"),
    ] = None,
    type: Annotated[
        str | None,
        Option(
            "--type",
            help="The mix of formats; listed above. [dim](Q4_K_M; with --hot-first the file's own)[/]",
            rich_help_panel=FORMATS,
        ),
    ] = None,
    hot_first: Annotated[
        bool,
        Option(
            "--hot-first",
            help="Neurons in the order of the model's profile (edgeinfer profile), the hottest first.",
            rich_help_panel=FORMATS,
        ),
    ] = False,
    imatrix: Annotated[
        Path | None,
        Option(
            "--imatrix",
            metavar="FILE",
            help="An importance matrix, GGUF or .dat: columns that matter more get the smaller error.",
            rich_help_panel=FORMATS,
        ),
    ] = None,
    tensor: Annotated[
        list[str] | None,
        Option(
            "--tensor",
            metavar="PATTERN=TYPE",
            help="Another type for tensors whose name the regular expression matches. May be repeated; "
            "the first match counts.",
            rich_help_panel=FORMATS,
        ),
    ] = None,
    output_type: Annotated[
        str | None,
        Option("--output-type", metavar="TYPE", help="For the output matrix.", rich_help_panel=FORMATS),
    ] = None,
    embedding_type: Annotated[
        str | None,
        Option("--embedding-type", metavar="TYPE", help="For token embeddings.", rich_help_panel=FORMATS),
    ] = None,
    pure: Annotated[
        bool,
        Option("--pure", help="One type for all tensors, no mix.", rich_help_panel=FORMATS),
    ] = False,
    allow_requantize: Annotated[
        bool,
        Option(
            "--allow-requantize",
            help="Take tensors that are quantized already; worse than from F16.",
            rich_help_panel=WORK,
        ),
    ] = False,
    threads: int | None = None,
    force: Annotated[
        bool, Option("--force", help="Replace OUT if it is there.", rich_help_panel=WORK)
    ] = False,
    dry_run: Annotated[
        bool,
        Option("--dry-run", help="Only print what each tensor would become.", rich_help_panel=WORK),
    ] = False,
    as_json: Annotated[
        bool, Option("--json", help="Print JSON for a program to read.", rich_help_panel=WORK)
    ] = False,
) -> None:
    """Store a model's weights in fewer bits: a smaller file that runs faster with slightly lower quality.

    OUT is written completely or not at all: Ctrl-C or a full disk leaves no file.

    [bold]Types, bits per weight[/]   (a mix uses more bits for some tensors)

      Q8_0 8.5 · Q6_K 6.6      almost no loss

      Q5_K_M Q5_K_S 5.5 · [bold]Q4_K_M[/] Q4_K_S 4.5      small loss; start here

      IQ4_XS 4.25 · IQ4_NL 4.5      a little smaller than Q4_K_S, slower on some machines

      Q3_K_L Q3_K_M Q3_K_S 3.4 · Q2_K Q2_K_S 2.6      for models that would not fit otherwise

      Q4_0 4.5 · Q4_1 5 · Q5_0 5.5 · Q5_1 6      older and simpler

      MXFP4_MOE 4.25 · TQ2_0 2.1 · TQ1_0 1.7      only for models that were trained for them

      F32 · F16 · BF16      conversions

    [bold]Examples[/]

      edgeinfer quantize model-F16.gguf model-Q4_K_M.gguf

      edgeinfer quantize model-F16.gguf --type Q3_K_M --dry-run

      edgeinfer quantize model-F16.gguf small.gguf --type IQ4_XS --imatrix imatrix.gguf

      edgeinfer quantize model-BF16.gguf out.gguf --type Q5_K_M --tensor 'ffn_down=Q6_K' --output-type Q8_0
    """
    overrides = _overrides(tensor or [])
    _check_usage(type, target, threads, dry_run)
    from edgeinfer.quantizing import quantize as quantize_file
    from edgeinfer_tui.output.quantize_report import print_table, quantize_report, summary

    progress = ProgressLine("quantizing", sys.stderr, shown=shown_bytes)
    interrupts.raise_exception()
    try:
        done = quantize_file(
            model,
            target,
            type,
            hot_first=hot_first,
            importance=imatrix,
            overrides=overrides,
            pure=pure,
            output_type=output_type,
            embedding_type=embedding_type,
            threads=threads,
            allow_requantize=allow_requantize,
            overwrite=force,
            dry_run=dry_run,
            progress=progress.update,
        )
    finally:
        progress.erase()
    _remark(done)
    report = quantize_report(done)
    if as_json:
        print(json.dumps(report, indent=2, allow_nan=False))
    elif dry_run:
        print_table(report)
    else:
        say(summary(report))


def _overrides(given: list[str]) -> dict[str, str]:
    """`PATTERN=TYPE` as pattern -> type; a pattern may contain `=`."""
    overrides: dict[str, str] = {}
    for text in given:
        pattern, sign, name = text.rpartition("=")
        if not (pattern and sign and name):
            raise BadParameter(f"--tensor: saw {text!r}, wanted PATTERN=TYPE, as ffn_down=Q6_K")
        overrides.setdefault(pattern, name)
    return overrides


def _check_usage(type: str | None, target: Path | None, threads: int | None, dry_run: bool) -> None:
    from edgeinfer_quant_formats.errors import FormatError
    from edgeinfer_quant_formats.quantizer.mixes import find_mix

    try:
        find_mix(type or "Q4_K_M")
    except FormatError as error:
        raise BadParameter(f"--type: {error}") from None
    if target is None and not dry_run:
        raise BadParameter("OUT is missing: the file to write; or ask with --dry-run what would be written")


def _remark(done: "Quantization") -> None:
    for note in done.warnings:
        say(note)
