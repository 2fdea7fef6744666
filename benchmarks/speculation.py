"""Baseline decoding against drafting, alternating: the built-in pair by text, edited code, planted and
simulated drafts.

python benchmarks/speculation.py --shapes tinyllama-1.1b,llama-3.2-3b --threads 2 --rounds 10
python benchmarks/speculation.py --device cuda --shapes llama-3-8b --share 0.5 --tables planted
python benchmarks/speculation.py --device cuda --head-shapes llama-3.1-8b+mtp --share 0.5 --tables heads
python benchmarks/speculation.py --tables agreeing --head-shapes qwen3.5-4b+mtp --llama-speculative PATH
"""

import argparse
from collections.abc import Iterator
from pathlib import Path

from edgeinfer.benchmarking.machine import command_line, this_machine
from edgeinfer.benchmarking.random_files import random_file, random_files_folder
from edgeinfer.errors import SettingError
from harness import suites
from harness.drafts import drafter_tables, head_tables, recorded_drafts, simulated_drafts
from harness.drafts.agreeing_head import agreeing_file
from harness.drafts.comparison import DraftSuite
from harness.drafts.timed_drafts import timed_table

TABLES = ("pair", "edited", "forced", "several", "planted", "heads", "agreeing", "simulated")
SIMULATED = (600, 5)
"""Tokens of a simulated completion, and seeds."""
TIMED = (128, 16)
"""Tokens of a completion in simulated time, and rounds."""
RECORDED = 150
"""Tokens of a completion whose drafts are recorded."""


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tables", default=",".join(TABLES), help="tables, with commas (%(default)s)")
    parser.add_argument("--shapes", default="tinyllama-1.1b", help="of large random models (%(default)s)")
    parser.add_argument(
        "--head-shapes", default="qwen3.5-0.8b+mtp", help="of random models with draft heads (%(default)s)"
    )
    parser.add_argument("--agreement", type=float, default=0.75, help="of such heads' files (%(default)s)")
    parser.add_argument(
        "--selected", type=float, help="share of first tokens in their texts (as in real text, or half)"
    )
    parser.add_argument("--llama-speculative", type=Path, help="llama.cpp's llama-speculative-simple")
    parser.add_argument("--type", default="Q4_0", help="(%(default)s)")
    parser.add_argument("--draft-shape", default="smollm2-135m", help="or shape:layers (%(default)s)")
    parser.add_argument("--draft-device", help="of planted drafts (that of their model)")
    parser.add_argument("--share", type=float, help="of a large model's weights on the GPU (all that fit)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    parser.add_argument("--threads", type=int, help="(all)")
    parser.add_argument("--rounds", type=int, default=10, help="(%(default)s)")
    parser.add_argument("--tokens", type=int, default=96, help="of each answer (%(default)s)")
    parser.add_argument("--smoke", action="store_true", help="a few tokens of the built-in model")
    parser.add_argument("--out", type=Path, help="write the tables to this file too")
    options = parser.parse_args()
    rounds, tokens = (1, 8) if options.smoke else (options.rounds, options.tokens)
    suite = DraftSuite(options.device, options.threads, rounds, tokens)
    tables = list(_tables(suite, options, requested_tables(options)))
    suites.write_report("Speculative decoding", this_machine(command_line()).lines(), tables, options.out)


def requested_tables(options: argparse.Namespace) -> set[str]:
    """The requested tables that this machine can measure. Raises `SettingError`."""
    names = set(suites.words(options.tables))
    if wrong := sorted(names - set(TABLES)):
        raise SettingError(f"--tables: saw {wrong[0]!r}, wanted some of {', '.join(TABLES)}")
    if options.device != "cpu":  # without support for trees and batches
        names -= {"forced", "several"}
    return names - {"planted", "agreeing"} if options.smoke else names


def _tables(suite: DraftSuite, options: argparse.Namespace, requested: set[str]) -> Iterator[tuple[str, str]]:
    """The title and the text of each requested table."""
    large = list[Path]()
    if requested & {"several", "planted"} and not options.smoke:
        large = [random_file(shape, options.type) for shape in suites.words(options.shapes)]
    if "pair" in requested:
        yield "the built-in pair", drafter_tables.pair_table(suite)
    if "edited" in requested:
        yield "edited code", drafter_tables.edited_table(suite)
    if "forced" in requested:
        yield "tree against chain, fixed lengths", drafter_tables.forced_table(suite)
    if "several" in requested:
        yield "completions as a batch", drafter_tables.batches_table(suite, ["tiny", *large[:1]])
    if "planted" in requested:
        small = _small_file(options.draft_shape, options.type)
        table = drafter_tables.planted_table(suite, large, small, options.draft_device, options.share)
        yield "drafts with a given acceptance rate", table
    if "heads" in requested:
        files = [] if options.smoke else _agreeing_files(options)
        table = head_tables.heads_table(suite, files or ["tiny"], options.share)
        yield "draft heads with given acceptance rates", table
    if "agreeing" in requested:
        table = head_tables.agreeing_table(suite, _agreeing_files(options), options.llama_speculative)
        yield "heads that agree by their weights", table
    if "simulated" in requested:
        yield from simulated_drafts.tables(*((60, 1) if options.smoke else SIMULATED))
        timed = timed_table(*((16, 1) if options.smoke else TIMED))
        yield "simulated: planted heads with the costs of an H100", timed
        recorded = recorded_drafts.table(24 if options.smoke else RECORDED)
        yield "simulated: drafts of the built-in head", recorded


def _agreeing_files(options: argparse.Namespace) -> list[Path]:
    """The files of models whose heads agree by their weights."""
    return [
        agreeing_file(shape, options.type, options.agreement, options.selected)
        for shape in suites.words(options.head_shapes)
    ]


def _small_file(shape: str, kind: str) -> Path:
    """The random file of a shape, or of the first layers of one."""
    if ":" not in shape:
        return random_file(shape, kind)
    folder = random_files_folder()
    folder.mkdir(parents=True, exist_ok=True)
    return suites.written_shape(f"{shape}:{kind}", folder)


if __name__ == "__main__":
    suites.main(main)
