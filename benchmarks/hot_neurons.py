"""Hot neurons on the GPU, active cold ones on the CPU: a planted ReLU model larger than the GPU.

python benchmarks/hot_neurons.py --llama-bench PATH/llama-bench

python benchmarks/hot_neurons.py --one-layer --shapes relu-7b --threads 1,2

python benchmarks/hot_neurons.py --shapes moe-2b --active 0.05,0.1,0.2 --threads 2

Every case runs our dense split, the sparse ones and llama.cpp's settings in turns. Without a GPU the same
runs on the CPU alone, without budgets. Cases that `--seconds` leaves no time for are listed as skipped.
`--one-layer`: a single feed-forward on the CPU, dense against sparse, with other options; on a GPU, where
active neurons are gathered, with `--device cuda`. `--from-disk`: models that memory can't hold.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from edgeinfer.benchmarking.machine import command_line, this_machine
from edgeinfer.benchmarking.tables import markdown
from edgeinfer.errors import SettingError
from edgeinfer.loading import gpu_loading
from edgeinfer_kernels.cuda.driver import list_gpus
from edgeinfer_kernels.system.processor import usable_cpus
from harness import suites
from harness.cuda_runs import gpu_name
from harness.disk import from_disk
from harness.hot_neurons import gathered_layer, one_layer
from harness.hot_neurons.comparison import (
    HEAD,
    LLAMA_HEAD,
    REFERENCE_HEAD,
    Case,
    Reference,
    Run,
    reference,
    reference_cells,
    setting_cells,
)
from harness.hot_neurons.planted_files import (
    HOT_COVER,
    HOT_SHARE,
    PlantedFile,
    find_planted_model,
    write_planted,
)
from harness.hot_neurons.time_split import HEAD as TIME_HEAD

Rows = list[list[str]]


@dataclass
class Report:
    """The rows of all tables."""

    references: Rows
    cases: Rows
    times: Rows
    settings: Rows
    skipped: list[str]

    def sections(self) -> list[tuple[str, str]]:
        """Headed tables."""
        named = (5,) if self.cases else ()
        tables = [
            ("Activity and exact mode on the CPU alone", markdown(REFERENCE_HEAD, self.references)),
            ("Milliseconds per token", markdown(HEAD, self.cases, left=(0, 4, *named))),
            ("Where a token's time goes, median ms", markdown(TIME_HEAD, self.times, left=(0, *named[:1]))),
            ("llama.cpp's settings", markdown(LLAMA_HEAD, self.settings, left=(0, 3))),
        ]
        return [*tables, *([("Skipped", ", ".join(self.skipped))] if self.skipped else [])]


def options() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llama-bench", type=Path, help="llama.cpp's llama-bench, built for this GPU")
    parser.add_argument("--shapes", default="relu-7b,relu2-7b", help="planted shapes (%(default)s)")
    parser.add_argument("--active", default="0.1,0.2", help="shares of active neurons (%(default)s)")
    parser.add_argument(
        "--cover", type=float, default=HOT_COVER, help="activations of the hottest 26 %% (%(default)s)"
    )
    parser.add_argument("--shares", default="0.25,0.5", help="budgets, of the weights (%(default)s)")
    parser.add_argument("--threads", help="CPU threads with commas, most important first (all, 8, 4, 2)")
    parser.add_argument("--rounds", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--tokens", type=int, default=32, help="timed tokens of a round (%(default)s)")
    parser.add_argument("--checked", type=int, default=200, help="tokens compared with dense (%(default)s)")
    parser.add_argument("--tuning", type=float, default=1.0, help="seconds of tuning a step (%(default)s)")
    parser.add_argument("--seconds", type=float, default=410.0, help="end, about (%(default)s)")
    parser.add_argument("--folder", type=Path, help="folder of the model files (a temporary one)")
    parser.add_argument("--smoke", action="store_true", help="tiny models, to check that the program runs")
    parser.add_argument("--out", type=Path, help="write the tables to this file too")
    return parser.parse_args()


def cases(files: list[PlantedFile], given: argparse.Namespace, threads: tuple[int, ...]) -> Iterator[Case]:
    """All cases, those of the first number of threads first; of the others only the first activity."""
    activities, shares = suites.shares(given.active), suites.shares(given.shares)
    for count in threads:
        for active in activities if count == threads[0] else activities[:1]:
            for file in files:
                for share in shares:
                    yield Case(file, active, share, count)


def run_cases(files: list[PlantedFile], given: argparse.Namespace, run: Run, report: Report) -> None:
    """Run all cases that begin in time."""
    known: dict[tuple[str, float], Reference] = {}
    planted: dict[str, float] = {}
    theirs: dict[tuple[str, float, int], dict[tuple[str, ...], list[float]]] = {}
    begin, last = time.monotonic(), 0.0
    threads = suites.whole_numbers("--threads", given.threads, 1) or default_threads()
    for case in cases(files, given, threads):
        name, started = case.file.shape.name, time.monotonic()
        if started - begin + last > given.seconds:
            report.skipped.append(" ".join(case.begin))
            continue
        if planted.get(name) != case.active:
            trained = case.file.plant(case.active, given.cover)
            planted[name] = case.active
            if (name, case.active) not in known:
                first = not any(name == file for file, _ in known)
                found = reference(case.file, trained, run, case.threads, with_exact=first)
                known[name, case.active] = found
                report.references.append(reference_cells(case.file, case.active, found))
                _print(report.references[-1])
        of_llama_cpp = theirs.setdefault((name, case.share, case.threads), {})
        is_first = not of_llama_cpp
        rows, times = case.compare(run, known.get((name, case.active)), of_llama_cpp)
        settings = setting_cells(case, of_llama_cpp) if is_first else []
        report.cases += rows
        report.times += times
        report.settings += settings
        for row in (*rows, *times, *settings):
            _print(row)
        last = time.monotonic() - started


def default_threads() -> tuple[int, ...]:
    """All threads, then those of smaller machines."""
    every = usable_cpus()
    return (every, *(count for count in (8, 4, 2) if count < every))


def _print(row: list[str]) -> None:
    print(" | ".join(row), file=sys.stderr, flush=True)


def main() -> None:
    """Run the benchmark with the options of the command line."""
    if "--from-disk" in sys.argv:
        from_disk.main()
        return
    if "--one-layer" in sys.argv:
        (gathered_layer if "--device" in sys.argv else one_layer).main()
        return
    given = options()
    if given.smoke:
        given.shapes, given.rounds, given.tokens, given.checked = "relu-smoke,relu2-smoke,moe-smoke", 1, 4, 12
        given.threads = given.threads or "2"
    if not HOT_SHARE <= given.cover < 1:
        raise SettingError(f"--cover: saw {given.cover}, wanted a share from {HOT_SHARE} to less than 1")
    gpu_loading.TUNING_SECONDS = given.tuning
    device = "cpu" if not list_gpus() else "auto" if given.smoke else "cuda"
    run = Run(given.llama_bench, device, given.rounds, given.tokens, given.checked)
    report = Report([], [], [], [], [])
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        shapes = [find_planted_model(name) for name in suites.words(given.shapes)]
        files = [write_planted(folder, shape, "Q4_0") for shape in shapes]
        run_cases(files, given, run, report)
    facts = [f"GPU: {gpu_name()}", *this_machine(command_line()).lines()]
    suites.write_report("Hot and cold neurons", facts, report.sections(), given.out)


if __name__ == "__main__":
    suites.main(main)
