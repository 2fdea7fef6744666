"""Shared code of the programs in benchmarks/: options, models, random files, reports."""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from edgeinfer.benchmarking.machine import Machine, command_line, this_machine
from edgeinfer.benchmarking.measuring import PIECE_TOKENS
from edgeinfer.benchmarking.random_files import random_file, write_random_file
from edgeinfer.benchmarking.speed_runs import (
    BenchedModel,
    BenchSettings,
    SpeedRow,
    VersusRow,
    measure_speed,
    measure_versus,
)
from edgeinfer.benchmarking.tables import speed_table, versus_table
from edgeinfer.benchmarking.workloads import Workload
from edgeinfer.errors import EdgeInferError, SettingError
from edgeinfer.registry.registry import find_model
from edgeinfer.shapes.known_shapes import find_shape
from edgeinfer_kernels.system.processor import usable_cpus
from edgeinfer_quant_formats import FormatError

ROUNDS = 12
REPETITIONS = 5
SMOKE_ROUNDS = 2
SMOKE_PIECE = 2


@dataclass(frozen=True)
class Suite:
    """One run of a program in benchmarks/."""

    title: str
    models: tuple[str, ...]
    """Names or paths; empty: every shape in every type."""
    shapes: tuple[str, ...]
    types: tuple[str, ...]
    threads: tuple[int, ...]
    rounds: int
    smoke: bool
    alone: bool
    out: Path | None
    machine: Machine

    def benched_models(self) -> Iterator[BenchedModel]:
        """The files, one by one; random ones are written when needed."""
        for name in self.models or self._random_files():
            model = BenchedModel.find(name)
            print(model.name, file=sys.stderr, flush=True)
            yield model

    def _random_files(self) -> Iterator[Path]:
        for shape in self.shapes:
            for kind in self.types:
                yield random_file(shape, kind, _Label().step(f"writing {shape} {kind}"))

    def settings(self, workloads: Sequence[Workload]) -> BenchSettings:
        """Measurement settings of each model."""
        label = _Label()
        return BenchSettings(
            workloads,
            self.threads,
            repetitions=1 if self.smoke else REPETITIONS,
            rounds=self.rounds,
            piece=SMOKE_PIECE if self.smoke else PIECE_TOKENS,
            loading={"device": "cpu"},
            report=label.report,
        )

    def speeds(self, workloads: Sequence[Workload]) -> str:
        """A table of the workloads with every model, against llama.cpp unless alone."""
        settings = self.settings(workloads)
        if self.alone:
            tables = [
                speed_table(model, list(measure_speed(model, settings))) for model in self.benched_models()
            ]
            return "\n\n".join(tables)
        return versus_table(self.versus(workloads))

    def versus(self, workloads: Sequence[Workload]) -> list[tuple[BenchedModel, VersusRow]]:
        """Every model interleaved with llama.cpp; each result is printed to stderr at once."""
        settings = self.settings(workloads)
        rows = []
        for model in self.benched_models():
            for row in measure_versus(model, settings):
                ratios = f"{row.best_ratio:.2f}x (best decile), {row.median_ratio:.2f}x (median)"
                print(f"  {row.workload.name}, {row.threads} threads: {ratios}", file=sys.stderr, flush=True)
                rows.append((model, row))
        return rows

    def speed_rows(self, workloads: Sequence[Workload]) -> list[tuple[BenchedModel, SpeedRow]]:
        """Every model alone."""
        settings = self.settings(workloads)
        return [(model, row) for model in self.benched_models() for row in measure_speed(model, settings)]

    def publish(self, sections: Sequence[tuple[str, str]]) -> None:
        """Print headed tables with machine and command; into `out` as well."""
        write_report(self.title, self.machine.lines(), sections, self.out)


def write_report(
    title: str, facts: Sequence[str], sections: Sequence[tuple[str, str]], out: Path | None
) -> None:
    """Print a title, facts as a list, and headed tables; into `out` as well."""
    listed = "\n".join(f"- {line}" for line in facts)
    text = "\n\n".join([f"# {title}", listed, *(f"## {head}\n\n{body}" for head, body in sections)])
    print(text)
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(f"{text}\n", encoding="utf-8")


def parser(description: str) -> argparse.ArgumentParser:
    """The options of every program."""
    made = argparse.ArgumentParser(description=description)
    made.add_argument("--models", help="names or paths with commas, instead of shapes and types")
    made.add_argument("--shapes", default="tinyllama-1.1b", help="shapes with commas (%(default)s)")
    made.add_argument("--types", default="Q4_0,Q8_0,Q4_K_M,Q5_K_M", help="types with commas (%(default)s)")
    made.add_argument("--threads", help="numbers of threads with commas (1 and all)")
    made.add_argument("--rounds", type=int, default=ROUNDS, help="(%(default)s)")
    made.add_argument("--alone", action="store_true", help="without llama.cpp")
    made.add_argument(
        "--smoke",
        action="store_true",
        help="the built-in model, a few seconds, to check that the program runs",
    )
    made.add_argument("--out", type=Path, help="write the tables to this file too")
    return made


def suite(title: str, options: argparse.Namespace) -> Suite:
    """The suite for these options."""
    machine = this_machine(command_line())
    if options.smoke:
        alone = options.alone or find_spec("llama_cpp") is None
        return Suite(
            title, ("tiny",), (), (), (usable_cpus(),), SMOKE_ROUNDS, True, alone, options.out, machine
        )
    counts = whole_numbers("--threads", options.threads, 1) or tuple(sorted({1, usable_cpus()}))
    return Suite(
        title,
        words(options.models),
        words(options.shapes),
        words(options.types),
        counts,
        options.rounds,
        False,
        options.alone,
        options.out,
        machine,
    )


def main(body: Callable[[], None]) -> None:
    """Run a program; an error ends it with one line."""
    try:
        body()
    except (EdgeInferError, FormatError, OSError) as error:
        sys.exit(f"{Path(sys.argv[0]).name}: {error}")


def whole_numbers(option: str, text: str | None, minimum: int) -> tuple[int, ...]:
    """ "1,2" -> (1, 2). Raises `SettingError` for what isn't a whole number of at least `minimum`."""
    items = words(text)
    wrong = [word for word in items if not (word.isascii() and word.isdigit() and int(word) >= minimum)]
    if wrong:
        raise SettingError(f"{option}: saw {wrong[0]!r}, wanted whole numbers of at least {minimum}, as 1,2")
    return tuple(map(int, items))


def words(text: str | None) -> tuple[str, ...]:
    """ "a, b" -> ("a", "b")."""
    return tuple(word.strip() for word in (text or "").split(",") if word.strip())


def shares(text: str) -> list[float]:
    """Numbers above 0 with commas between. Raises `SettingError`."""
    try:
        numbers = [float(word) for word in words(text)]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) <= 0:
        raise SettingError(f"--shares: saw {text!r}, wanted numbers above 0 with commas between")
    return numbers


class _Label:
    """Prints the name of each measurement to stderr, once."""

    def __init__(self) -> None:
        self._last_label = ""

    def report(self, label: str, done: int, total: int) -> None:
        if label != self._last_label:
            self._last_label = label
            print(f"  {label.rstrip(':')}", file=sys.stderr, flush=True)

    def step(self, label: str) -> Callable[[int, int], None]:
        """The callback of one step."""
        return lambda done, total: self.report(label, done, total)


def written_shape(text: str, folder: Path) -> Path:
    """The random file of "shape:layers:type" in a folder, created if it doesn't exist.

    Raises `SettingError`: another text.
    """
    name, layers, kind = (*text.split(":"), "", "")[:3]
    if not layers.isdigit() or not kind:
        raise SettingError(f"--models: saw {text!r}, wanted shape:layers:type")
    path = folder / f"{name}-{layers}-layers-{kind}.gguf"
    if not path.exists():
        write_random_file(path, replace(find_shape(name), layers=int(layers)), kind)
    return path


def written_shapes(texts: Iterable[str], folder: Path | None) -> Iterator[Path]:
    """`written_shape` of each; without `folder`, in a temporary folder and deleted before the next one."""
    for text in texts:
        with tempfile.TemporaryDirectory() as temporary:
            yield written_shape(text, folder or Path(temporary))


def model_files(texts: Iterable[str], folder: Path | None) -> Iterator[Path]:
    """As `written_shapes`; a text without colons is a name or path. Raises `UnknownModelError` too."""
    for text in texts:
        if ":" in text:
            yield from written_shapes([text], folder)
        else:
            yield find_model(text).path
