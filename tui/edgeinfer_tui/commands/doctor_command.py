"""`edgeinfer doctor`: features of this machine and how edgeinfer uses them."""

import dataclasses
import json
from typing import Annotated

import typer

from edgeinfer_tui import interrupts
from edgeinfer_tui.options import arguments
from edgeinfer_tui.options.command_options import command
from edgeinfer_tui.output.columns import print_pairs, shown_bytes
from edgeinfer_tui.output.labelled_progress import LabelledProgress
from edgeinfer_tui.output.progress_line import BUILDING, shown_time


@command("doctor")
def doctor(
    threads: int | None = None,
    warm: Annotated[
        bool,
        typer.Option(
            "--warm",
            help="Compile the kernels now, so that no first run waits: those of every format, or of --model.",
            show_default=False,
        ),
    ] = False,
    model: Annotated[
        list[str] | None,
        typer.Option("--model", metavar="MODEL", help="With --warm: only what this needs. May be repeated."),
    ] = None,
    as_json: arguments.AsJson = False,
) -> None:
    """Report on this machine: CPU features, active kernels, threads, memory bandwidth (measured), versions.

    Takes a few seconds. Include its output in reports of bugs or slow runs.
    """
    if model and not warm:
        raise typer.BadParameter("--model says what --warm compiles; add --warm")
    if warm:
        _warm(model or [], as_json)
        return
    from edgeinfer_tui.output import doctor_report
    from edgeinfer_tui.system import machine_probes

    report = doctor_report.gather(machine_probes.probes(threads))
    if as_json:
        print(json.dumps(report, indent=2, default=str))
    else:
        doctor_report.print_report(report)


def _warm(models: list[str], as_json: bool) -> None:
    """Compile kernels with progress, and report the time."""
    from edgeinfer.engine.warming import warm_kernels

    interrupts.raise_exception()
    with LabelledProgress(time_left=True) as progress:
        warmed = warm_kernels(models, progress.step(BUILDING))
    record = {**dataclasses.asdict(warmed), "folder": str(warmed.folder)}
    if as_json:
        print(json.dumps(record, indent=2))
        return
    compiled = f"{warmed.built} compiled now in {shown_time(warmed.seconds, exact=True)}"
    print_pairs(
        [
            ("instruction set", warmed.instruction_set),
            ("kernels", f"{len(warmed.units)} units, {compiled}"),
            ("folder", f"{warmed.folder}, {shown_bytes(warmed.bytes)}"),
        ]
    )
