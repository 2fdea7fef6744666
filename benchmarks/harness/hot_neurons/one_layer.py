"""A feed-forward that reads active neurons only, against the dense one, on the CPU.

python benchmarks/hot_neurons.py --one-layer --shapes relu-1b,relu-7b,relu2-4b --types Q4_0,Q8_0 --threads 1,2
python benchmarks/hot_neurons.py --one-layer --shapes smallthinker-21b,nemotron3-30b --types Q4_0 --active 0.1
"""

import argparse
import sys
from pathlib import Path

from edgeinfer.benchmarking.machine import command_line, this_machine
from edgeinfer.benchmarking.tables import markdown
from edgeinfer.benchmarking.timings import BEST_DECILE, MEDIAN
from edgeinfer.errors import SettingError
from edgeinfer_kernels.system.processor import usable_cpus
from harness import suites
from harness.planted_neurons import find_planted
from harness.sparse_runs import EXACT, PREDICTED, SparseRun, model_run, planted_run

HEAD = ("feed-forward", "threads", "way", "best decile", "of dense", "median", "of dense", "GB/s", "error")
PREDICTOR_HEAD = ("feed-forward", "active", "rank", "bytes", "of the layer", "recall", "named")


def rows(run: SparseRun) -> list[list[str]]:
    """A row for each variant; GB/s counts the dense layer's bytes."""
    rows = []
    for way, timings in run.timings.items():
        cells = [run.name, str(run.threads), way]
        for share in (BEST_DECILE, MEDIAN):
            seconds = timings.seconds_at(share)
            ratio = seconds / run.timings["dense"].seconds_at(share)
            cells += [f"{seconds * 1e6:.1f} us", f"{ratio:.3f}x"]
        speed = f"{run.dense_bytes / timings.seconds_at(BEST_DECILE) / 1e9:.1f}" if way == "dense" else "-"
        rows.append([*cells, speed, f"{run.errors[way]:.1e}"])
    return rows


def predictor_row(run: SparseRun) -> list[str]:
    """Cost and quality of the predictor, on held-out inputs."""
    if run.trained is None:
        return [run.name, f"{run.active:.1%}", *["-"] * 5]
    predictor = run.trained.predictor
    return [
        run.name,
        f"{run.trained.active:.1%}",
        str(predictor.rank),
        str(predictor.nbytes),
        f"{predictor.nbytes / run.dense_bytes:.1%}",
        f"{run.trained.recall:.1%}",
        f"{run.trained.named:.1%}",
    ]


def options() -> argparse.Namespace:
    """The options of the command line after `--one-layer`."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--one-layer", action="store_true", help="this program")
    parser.add_argument("--shapes", default="relu-1b,relu-7b,relu2-4b", help="planted shapes (%(default)s)")
    parser.add_argument("--types", default="Q4_0,Q8_0", help="formats with commas (%(default)s)")
    parser.add_argument("--models", default="tiny", help="models with a ReLU (%(default)s)")
    parser.add_argument("--predicted", action="store_true", help="the models' own predictors too")
    parser.add_argument(
        "--active", type=float, default=0.2, help="planted share of active neurons (%(default)s)"
    )
    parser.add_argument("--hot", type=float, default=0.0, help="share of neurons on a GPU (%(default)s)")
    parser.add_argument("--threads", help="numbers of threads with commas (1 and all)")
    parser.add_argument("--rounds", type=int, default=suites.ROUNDS, help="(%(default)s)")
    parser.add_argument("--smoke", action="store_true", help="a few seconds, to check that the program runs")
    parser.add_argument("--out", type=Path, help="write the tables to this file too")
    return parser.parse_args()


def main() -> None:
    """Run the benchmark with the options of the command line."""
    given = options()
    if not 0 < given.active < 1:
        raise SettingError(f"--active: saw {given.active}, wanted a share between 0 and 1")
    if not 0 <= given.hot < 1:
        raise SettingError(f"--hot: saw {given.hot}, wanted a share from 0 to less than 1")
    threads = suites.whole_numbers("--threads", given.threads, 1) or tuple(sorted({1, usable_cpus()}))
    rounds, shapes, kinds = given.rounds, suites.words(given.shapes), suites.words(given.types)
    if given.smoke:
        threads, rounds, kinds = threads[-1:], suites.SMOKE_ROUNDS, ("Q4_0",)
        shapes = ("smoke", "smoke-experts")
    machine = this_machine(command_line())
    runs = []
    for shape in map(find_planted, shapes):
        for kind in kinds:
            runs += planted_run(shape, kind, given.active, threads, rounds, _print_progress, given.hot)
    variants = (EXACT, PREDICTED) if given.predicted else (EXACT,)
    for model in suites.words(given.models):
        runs += [model_run(model, variants, count, rounds) for count in threads]
    tables = [
        ("One layer, one token", markdown(HEAD, [row for run in runs for row in rows(run)], left=(0, 2))),
        ("Predictors", markdown(PREDICTOR_HEAD, [predictor_row(run) for run in runs[:: len(threads)]])),
    ]
    suites.write_report("Sparse feed-forward on the CPU", machine.lines(), tables, given.out)


def _print_progress(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
