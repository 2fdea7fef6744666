"""A planted ReLU model that memory can't hold: memory-mapped, read ahead, and by active neurons.

python benchmarks/hot_neurons.py --from-disk --shapes relu-7b,relu-1b --shares 0.5,0.75

Every row is a program in a memory cgroup of a share of what the model needs in memory, besides Python; files
aren't in the page cache at its start. `drafted`: with a planted drafter, at the cost of a small model.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from edgeinfer.benchmarking.machine import command_line, this_machine
from edgeinfer.benchmarking.tables import NOTHING, markdown
from edgeinfer.bundling import bundle_neurons
from edgeinfer.planning.model_plan import plan_model
from edgeinfer_kernels.system.processor import usable_cpus
from edgeinfer_offload.machine.disk_speed import disk_speed
from harness import suites
from harness.disk import disk_child
from harness.disk.disk_child import CONTEXT, ChildOptions, ChildResult
from harness.disk.memory_cgroup import memory_cgroup
from harness.hot_neurons.planted_files import PlantedFile, find_planted_model, write_planted

HEAD = (
    "model", "memory", "weights", "ms/token", "against mapped", "by the plan", "MiB held", "MiB in file",
    "neurons in memory", "seconds to load",
)  # fmt: skip
PYTHON_BYTES = 120 << 20
"""Memory of the program besides the model."""
MIB = 1 << 20
AGREEMENTS = (0.9, 0.7)
DRAFT_SHAPE = "relu-smoke"


def options() -> argparse.Namespace:
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default="relu-1b", help="planted shapes (%(default)s)")
    parser.add_argument("--shares", default="0.5", help="memory, of what the model needs (%(default)s)")
    parser.add_argument("--active", type=float, default=0.1, help="share of active neurons (%(default)s)")
    parser.add_argument("--how", default="mapped,dense,exact,predicted", help="(%(default)s)")
    parser.add_argument("--drafted", action="store_true", help="also with drafts, of mapped and dense")
    parser.add_argument("--threads", type=int, help="CPU threads (all)")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of a run (%(default)s)")
    parser.add_argument("--mapped-tokens", type=int, default=12, help="of a mapped one (%(default)s)")
    parser.add_argument("--no-cgroup", action="store_true", help="only the budget limits memory")
    parser.add_argument("--folder", type=Path, help="folder of the model files (a temporary one)")
    parser.add_argument("--smoke", action="store_true", help="tiny models, to check that the program runs")
    parser.add_argument("--out", type=Path, help="write the tables to this file too")
    return parser.parse_args([each for each in sys.argv[1:] if each != "--from-disk"])


def needed_bytes(path: Path, threads: int) -> int:
    """Bytes in memory of the whole model."""
    plan = plan_model(
        path, device="cpu", context=CONTEXT, draft=None, parallel=1, threads=threads, sparse="off", ram="1TiB"
    ).plan
    return plan.bytes_on("cpu")


def measured(child: ChildOptions, limit: int | None) -> ChildResult | str:
    """The result of a program in a group of `limit` bytes, None: in none; or why it ended."""
    if limit is None:
        return _output(child, "")
    with memory_cgroup(limit) as group:
        return _output(child, str(group.folder))


def _output(child: ChildOptions, group: str) -> ChildResult | str:
    command = [sys.executable, "-P", disk_child.__file__, group, json.dumps(asdict(child))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        return (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
    answer = json.loads(done.stdout.splitlines()[-1])
    return str(answer["error"]) if "error" in answer else ChildResult(**answer)


def rows(file: PlantedFile, given: argparse.Namespace) -> Iterator[list[str]]:
    """The rows of one model."""
    threads = given.threads or usable_cpus()
    needed = needed_bytes(file.path, threads)
    folder = file.path.parent / "drafts"
    folder.mkdir(exist_ok=True)
    small = write_planted(folder, find_planted_model(DRAFT_SHAPE), "Q4_0").path
    ways = [(how, 0.0) for how in suites.words(given.how)]
    if given.drafted:
        ways += [(how, agreement) for how in ("mapped", "dense") for agreement in AGREEMENTS]
    for share in suites.shares(given.shares):
        mapped: float | None = None
        ram = int(share * needed)
        for how, agreement in ways:
            tokens = given.mapped_tokens if how == "mapped" else given.tokens
            child = ChildOptions(
                str(file.path), how, ram, threads, tokens, str(small) if agreement else "", agreement
            )
            result = measured(child, None if given.no_cgroup else ram + PYTHON_BYTES)
            if how == "mapped" and not agreement and isinstance(result, ChildResult):
                mapped = result.seconds
            name = f"{how}, {agreement:.0%} of drafts accepted" if agreement else how
            row = cells(file.shape.name, share, name, result, mapped)
            failure = [result] if isinstance(result, str) else []
            print(" | ".join([*row, *failure]), file=sys.stderr, flush=True)
            yield row


def cells(model: str, share: float, how: str, result: ChildResult | str, mapped: float | None) -> list[str]:
    """One row under HEAD."""
    begin = [model, f"{share:.0%}", how]
    if isinstance(result, str):
        return [*begin, *[NOTHING] * (len(HEAD) - 3)]
    return [
        *begin,
        f"{1000 * result.seconds:.1f}",
        f"{result.seconds / mapped:.2f}x" if mapped else NOTHING,
        f"{1000 * result.planned:.1f}",
        f"{result.held / MIB:.0f}",
        f"{result.in_file / MIB:.0f}",
        f"{result.hits:.0%}" if result.hits else NOTHING,
        f"{result.load_seconds:.1f}",
    ]


def main() -> None:
    """Run the benchmark with the options of the command line."""
    given = options()
    if given.smoke:
        given.shapes, given.tokens, given.mapped_tokens, given.no_cgroup = "relu-smoke", 6, 4, True
        given.shares, given.drafted = "0.8", True
    table: list[list[str]] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = given.folder or Path(temporary)
        for name in suites.words(given.shapes):
            file = write_planted(folder, find_planted_model(name), "Q4_0")
            file.plant(given.active)
            bundle_neurons(file.path)
            table += rows(file, given)
        disk = disk_speed(file.path)
    facts = [
        f"disk: {disk.bytes_per_second / 1e9:.2f} GB/s, {1 / disk.read_seconds:,.0f} small reads a second",
        *this_machine(command_line()).lines(),
    ]
    suites.write_report(
        "Models that memory can't hold", facts, [("Tokens", markdown(HEAD, table, left=(0, 2)))], given.out
    )
