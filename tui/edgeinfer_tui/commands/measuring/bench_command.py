"""`edgeinfer bench`: speed of a model on this machine, alone or compared with llama.cpp."""

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import typer

from edgeinfer_tui import interrupts
from edgeinfer_tui.failures import say
from edgeinfer_tui.options import arguments
from edgeinfer_tui.options import bench_options as own
from edgeinfer_tui.options.command_options import command
from edgeinfer_tui.output.columns import shown_bytes
from edgeinfer_tui.output.labelled_progress import LabelledProgress
from edgeinfer_tui.output.progress_line import BUILDING

if TYPE_CHECKING:
    from edgeinfer.benchmarking.speed_runs import BenchedModel, BenchSettings

WRITING = "writing a random file, once"


@command("bench")
def bench(
    invocation: typer.Context,
    model: arguments.ModelArgument = None,
    prompt_tokens: own.PromptTokens = ["512"],  # noqa: B006
    max_tokens: own.MaxTokens = ["128"],  # noqa: B006
    depth: own.Depth = ["0"],  # noqa: B006
    threads: own.Threads = None,
    repetitions: own.Repetitions = 5,
    warm_up: own.WarmUp = True,
    seed: own.Seed = 1,
    vs: own.Versus = None,
    rounds: own.Rounds = 10,
    shape: own.ShapeName = None,
    type_: own.TypeName = None,
    output: own.OutputFormat = own.Output.md,
    as_json: own.AsJson = False,
    **loading: Any,
) -> None:
    """Measure prompt processing (pp) and token generation (tg) speed, as llama-bench does.

    t/s is mean ± standard deviation over the repetitions. GB/s is what
    generation reads, compared with what the same number of threads can read.
    Too noisy: the middle half of a test's rounds differs by more than 10 %.
    With --vs both engines alternate, a few tokens at a time, on the same file.

    [bold]Examples[/]

      edgeinfer bench tiny

      edgeinfer bench model.gguf --prompt-tokens 512,32 --max-tokens 128 -d 0,4096 -t 1,2

      edgeinfer bench --shape tinyllama-1.1b --type Q4_K_M --vs llama.cpp
    """
    interrupts.raise_exception()
    with LabelledProgress() as progress:
        settings = _settings(invocation.params, loading, progress)
        model_to_measure = _model(model, shape, type_, progress)
        printed = _measure(model_to_measure, settings, vs, "json" if as_json else output)
    print(printed)


def _settings(
    given: Mapping[str, Any], loading: Mapping[str, Any], progress: LabelledProgress
) -> "BenchSettings":
    """The benchmark settings of the command line.

    Raises `BadParameter` for lists that aren't integers, or if there is nothing to measure.
    """
    from edgeinfer.benchmarking.speed_runs import BenchSettings
    from edgeinfer.benchmarking.workloads import workloads
    from edgeinfer_kernels.system.processor import usable_cpus

    lengths = ("prompt_tokens", "max_tokens", "depth")
    tests = workloads(
        *(own.numbers(f"--{name.replace('_', '-')}", given[name], minimum=0) for name in lengths)
    )
    if not tests:
        raise typer.BadParameter("--prompt-tokens and --max-tokens are both 0: nothing to measure")
    threads = given["threads"]
    return BenchSettings(
        tests,
        own.numbers("--threads", threads, minimum=1) if threads else [usable_cpus()],
        repetitions=given["repetitions"],
        rounds=given["rounds"],
        warm_up=given["warm_up"],
        seed=given["seed"],
        loading={name: value for name, value in loading.items() if value is not None},
        report=progress.update,
        load_progress=(progress.step("loading the model", shown_bytes), progress.step(BUILDING)),
    )


def _measure(model_to_measure: "BenchedModel", settings: "BenchSettings", vs: str | None, output: str) -> str:
    from edgeinfer.benchmarking import speed_runs, tables
    from edgeinfer.benchmarking.machine import command_line, this_machine

    machine = this_machine(command_line())
    rows: Sequence[Any]
    if vs is None:
        rows = list(speed_runs.measure_speed(model_to_measure, settings))
        table, records = (
            tables.speed_table(model_to_measure, rows),
            [tables.speed_record(row) for row in rows],
        )
    else:
        rows = list(speed_runs.measure_versus(model_to_measure, settings))
        table = tables.versus_table([(model_to_measure, row) for row in rows])
        records = [tables.versus_record(row) for row in rows]
    for line in (*tables.noise_lines(rows), *tables.energy_lines(rows)):
        say(line)
    if output == "json":
        return json.dumps(tables.report_record(model_to_measure, machine, records), indent=2, allow_nan=False)
    if output == "csv":
        return tables.csv_table(model_to_measure, records)
    return "\n\n".join([table, "\n".join(machine.lines())])


def _model(
    model: str | None, shape: str | None, kind: str | None, progress: LabelledProgress
) -> "BenchedModel":
    """The model file, or a random file of the given shape."""
    from edgeinfer.benchmarking.random_files import random_file
    from edgeinfer.benchmarking.speed_runs import BenchedModel

    if shape is None and kind is None:
        return BenchedModel.find(model)
    if shape is None or kind is None:
        raise typer.BadParameter("--shape and --type go together, as --shape tinyllama-1.1b --type Q4_K_M")
    if model is not None:
        raise typer.BadParameter(f"saw the model {model!r} and --shape {shape}; drop one of them")
    return BenchedModel.find(random_file(shape, kind, progress.step(WRITING, shown_bytes)))
