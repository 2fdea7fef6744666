"""Start-up to the first token: phases, memory, and the time that Python needs to import numba and numpy.

python benchmarks/startup.py --models tiny
"""

import sys
from collections.abc import Sequence

import numpy as np

from edgeinfer.benchmarking.speed_runs import BenchedModel
from edgeinfer.benchmarking.tables import markdown
from harness import suites
from harness.startup import PHASES, StartupPhases, commands, reading

IMPORTS, RUN = 'python -c "import numba, numpy"', "edgeinfer run MODEL Once --max-tokens 1"


def main() -> None:
    """Run the benchmark with the options of the command line."""
    parser = suites.parser(__doc__ or "")
    parser.set_defaults(models="tiny")
    options = parser.parse_args()
    suite = suites.suite("Start-up to the first token", options)
    sections = []
    for model in suite.benched_models():
        sections += _sections(model, 1 if suite.smoke else suite.rounds)
    suite.publish(sections)


def _sections(model: BenchedModel, rounds: int) -> list[tuple[str, str]]:
    """The tables of one model, with alternating programs; an untimed first round fills the caches."""
    program_seconds: dict[str, list[float]] = {name: [] for name in commands(str(model.path))}
    phases: list[StartupPhases] = []
    reads: list[float] = []
    StartupPhases.measure(str(model.path))
    for done in range(rounds):
        print(f"{model.name}: round {done + 1} of {rounds}", file=sys.stderr, flush=True)
        for name, run in commands(str(model.path)).items():
            program_seconds[name].append(run())
        phases.append(StartupPhases.measure(str(model.path)))
        reads.append(reading(model.path))
    return [
        (f"{model.name}: whole programs, seconds", _programs(program_seconds, reads)),
        (f"{model.name}: phases of a start, seconds", _phases(phases)),
        (f"{model.name}: memory", _memory(phases)),
    ]


def _cells(name: str, seconds: Sequence[float]) -> list[str]:
    return [name, f"{min(seconds):.3f}", f"{np.median(seconds):.3f}"]


def _programs(program_seconds: dict[str, list[float]], reads: Sequence[float]) -> str:
    minimum = np.add(program_seconds[IMPORTS], reads)
    rows = [
        _cells(name, seconds) for name, seconds in [*program_seconds.items(), ("reading the file", reads)]
    ]
    run = program_seconds[RUN]
    ratios = (min(run) / min(minimum), float(np.median(run)) / float(np.median(minimum)))
    rows.append(["edgeinfer run / (imports + reading)", *(f"{ratio:.2f}x" for ratio in ratios)])
    return markdown(["program", "best", "median"], rows)


def _phases(phases: Sequence[StartupPhases]) -> str:
    rows = [_cells(name.replace("_", " "), [getattr(each, name) for each in phases]) for name in PHASES]
    return markdown(["phase", "best", "median"], rows)


def _memory(phases: Sequence[StartupPhases]) -> str:
    planned, peak = phases[0].planned_bytes, max(each.peak_resident_bytes for each in phases)
    cells = [f"{nbytes / 2**20:.0f} MiB" for nbytes in (planned, peak, peak - planned)]
    return markdown(["planned", "peak resident", "beyond the plan"], [cells], left=())


if __name__ == "__main__":
    suites.main(main)
