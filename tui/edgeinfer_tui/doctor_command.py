"""`edgeinfer doctor`: what this machine offers and what edgeinfer makes of it."""

import json
from typing import Annotated

import typer

from edgeinfer_tui.failures import reporting


@reporting
def doctor(
    threads: Annotated[
        int | None, typer.Option("--threads", help="Measure the bandwidth with so many threads.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for a program to read.")] = False,
) -> None:
    """Look at this machine: CPU features and active kernels, memory bandwidth (measured), GPU, versions.

    Takes a few seconds. Put its output into a report of something slow or wrong.
    """
    from edgeinfer_tui import doctor_report, machine_probes

    if threads is not None and threads < 1:
        raise typer.BadParameter(f"--threads: saw {threads}, wanted a whole number of at least 1")
    report = doctor_report.gather(machine_probes.probes(threads))
    if as_json:
        print(json.dumps(report, indent=2, default=str))
    else:
        doctor_report.print_report(report)
