"""Plain decoding against drafting, in turns: the built-in pair by text, planted drafts on a large model.

python benchmarks/speculation.py --shape tinyllama-1.1b --type Q4_0 --threads 2 --rounds 6
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from edgeinfer.benchmarking import suites
from edgeinfer.benchmarking.machine import command_line, this_machine
from edgeinfer.benchmarking.planted_drafts import PlantedDrafter
from edgeinfer.benchmarking.random_files import random_file
from edgeinfer.benchmarking.tables import markdown
from edgeinfer.loading.loading import load
from edgeinfer.model import Model
from edgeinfer.results import Generation, Speed
from edgeinfer.speculation.speculator import Speculator

STORY = "Once upon a time, there was a little girl named Lily."
TEXTS = {
    "story": STORY,
    "chat": 'Tom said, "Hi Sue!" Sue said, "Hi Tom! Do you want to play?" Tom said,',
    "repeating": "The red cat sat. The blue cat sat. The red cat sat. The blue cat sat. The red cat",
    "random": "quz blorp ing ten of zz krel 7 ham",
}
AGREEMENTS = (0.9, 0.7, 0.5, 0.0)
SMALL_SHAPE = "smollm2-135m"
Answer = Callable[[], Generation]


def in_turns(sides: dict[str, Answer], rounds: int) -> dict[str, list[Speed]]:
    """Every side's speeds, one answer of each a round; the first round isn't counted."""
    found: dict[str, list[Speed]] = {name: [] for name in sides}
    for done in range(rounds + 1):
        for name, answer in sides.items():
            speed = answer().speed
            if done:
                found[name].append(speed)
    return found


def cells(speeds: Sequence[Speed], plain: Sequence[Speed]) -> list[str]:
    """Best and median tokens a second with their ratios to plain, accepted share, tokens a pass."""
    rates, base = ([s.decode_tokens_per_second for s in each] for each in (speeds, plain))
    shares = [s.accepted_share for s in speeds if s.accepted_share is not None]
    passes = [s.tokens_per_pass for s in speeds if s.tokens_per_pass is not None]
    return [
        f"{max(rates):.1f}",
        f"{max(rates) / max(base):.2f}x",
        f"{median(rates):.1f}",
        f"{median(rates) / median(base):.2f}x",
        f"{median(shares):.0%}" if shares else "-",
        f"{median(passes):.2f}" if passes else "-",
    ]


HEAD = ["best t/s", "to plain", "median t/s", "to plain", "accepted", "tokens a pass"]


def built_in(threads: int | None, rounds: int, tokens: int) -> Iterator[list[str]]:
    """The built-in pair: rows of text, temperature, drafter and what came of it."""
    with ExitStack() as open_models:
        models: dict[str, Model] = {
            name: open_models.enter_context(load("tiny", device="cpu", threads=threads, draft=draft))
            for name, draft in (("plain", None), ("draft model", "auto"), ("lookup", "lookup"))
        }
        for text, prompt in TEXTS.items():
            for temperature in (0.0, 0.8):
                print(f"  {text}, temperature {temperature}", file=sys.stderr, flush=True)
                settings: dict[str, Any] = {"max_tokens": tokens, "temperature": temperature}
                sides = {name: _answer(model, prompt, settings) for name, model in models.items()}
                found = in_turns(sides, rounds)
                for name, speeds in found.items():
                    yield [text, f"{temperature:g}", name, *cells(speeds, found["plain"])]


def _answer(model: Model, prompt: str, settings: dict[str, Any]) -> Answer:
    return lambda: model.generate(prompt, **settings)


def planted(path: Path, small: Path, threads: int | None, rounds: int, tokens: int) -> Iterator[list[str]]:
    """A large random model with drafts that agree by construction, and one that never does."""
    options: dict[str, Any] = {"device": "cpu", "threads": threads, "context": 512, "draft": None}
    with load(path, **options) as model, load(small, **options) as cost:
        settings: dict[str, Any] = {"max_tokens": tokens, "temperature": 0.0}
        ids = model.tokenizer.encode(STORY)[:8]
        plain = model.generate(ids, **settings)
        answer = [*plain.prompt_ids, *plain.ids]

        def drafting(speculator: Speculator) -> Generation:
            model._speculator = speculator
            try:
                found = model.generate(ids, **settings)
            finally:
                model._speculator = None
            if found.ids != plain.ids:
                raise AssertionError("drafting changed a greedy answer")
            return found

        sides: dict[str, Answer] = {"plain": lambda: model.generate(ids, **settings)}
        for agreement in AGREEMENTS:
            speculator = Speculator(model.engine, PlantedDrafter(cost.engine, answer, agreement))
            model.engine.rewind(0)
            speculator.measure()
            sides[f"{agreement:.0%} agree"] = lambda s=speculator: drafting(s)  # type: ignore[misc]
        found = in_turns(sides, rounds)
        for name, speeds in found.items():
            yield [path.stem, "0", name, *cells(speeds, found["plain"])]


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="tinyllama-1.1b", help="of the large random model (%(default)s)")
    parser.add_argument("--type", default="Q4_0", help="(%(default)s)")
    parser.add_argument("--threads", type=int, help="(all)")
    parser.add_argument("--rounds", type=int, default=6, help="turns of each (%(default)s)")
    parser.add_argument("--tokens", type=int, default=128, help="of each answer (%(default)s)")
    parser.add_argument("--smoke", action="store_true", help="a few tokens of the built-in model")
    parser.add_argument("--out", type=Path, help="write the tables to this file too")
    options = parser.parse_args()
    rounds, tokens = (1, 8) if options.smoke else (options.rounds, options.tokens)
    rows = list(built_in(options.threads, rounds, tokens))
    if not options.smoke:
        files = random_file(options.shape, options.type), random_file(SMALL_SHAPE, options.type)
        rows += planted(*files, options.threads, rounds, tokens)
    table = markdown(["text", "temperature", "drafter", *HEAD], rows, left=(0, 2))
    machine = this_machine(command_line())
    suites.write_report("Speculative decoding", machine.lines(), [("tokens a second", table)], options.out)


if __name__ == "__main__":
    suites.main(main)
