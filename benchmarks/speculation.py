"""Plain decoding against drafting, in turns: the built-in pair by text, code that is edited, planted drafts.

python benchmarks/speculation.py --shapes tinyllama-1.1b,llama-3.2-3b --threads 2 --rounds 10
"""

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from edgeinfer.benchmarking import suites
from edgeinfer.benchmarking.machine import command_line, this_machine
from edgeinfer.benchmarking.planted_drafts import PlantedDrafter
from edgeinfer.benchmarking.random_files import random_file
from edgeinfer.benchmarking.scripted_engine import ScriptedEngine
from edgeinfer.benchmarking.tables import markdown
from edgeinfer.language_model import Engine
from edgeinfer.loading.loading import load
from edgeinfer.model import Model
from edgeinfer.results import Generation, Speed
from edgeinfer.speculation.drafts import Drafter
from edgeinfer.speculation.prompt_lookup import PromptLookup
from edgeinfer.speculation.speculator import Speculator

STORY = "Once upon a time, there was a little girl named Lily."
TEXTS = {
    "story": STORY,
    "chat": 'Tom said, "Hi Sue!" Sue said, "Hi Tom! Do you want to play?" Tom said,',
    "random": "quz blorp ing ten of zz krel 7 ham",
}
CODE = "".join(
    f"def {name}_of(cart, rate):\n    total = sum(item.{name} * item.count for item in cart.items)\n"
    f"    return round(total * (1 + rate), 2)\n\n\n"
    for name in ("price", "weight", "volume", "deposit")
)
EDITED = CODE.replace("cart", "basket").replace("rate)", "rate=0.0)")
DRAFTERS: dict[str, dict[str, Any]] = {
    "plain": {"draft": None},
    "draft model": {"draft": "auto"},
    "the same, 3 leaves": {"draft": "auto", "draft_leaves": 3},
    "lookup": {"draft": "lookup"},
    "self": {"draft": "self"},
}
AGREEMENTS = (0.9, 0.7, 0.5, 0.0)
SMALL_SHAPE = "smollm2-135m"
SIDE_BY_SIDE = (1, 2, 4, 8, 16)
Answer = Callable[[], Generation]
Sides = dict[str, Answer]


def in_turns(sides: Sides, rounds: int) -> dict[str, list[Speed]]:
    """Every side's speeds, one answer of each a round; the first round isn't counted."""
    found: dict[str, list[Speed]] = {name: [] for name in sides}
    for done in range(rounds + 1):
        for name, answer in sides.items():
            speed = answer().speed
            if done:
                found[name].append(speed)
    return found


def best_decile(rates: Sequence[float]) -> float:
    return sorted(rates)[math.ceil(0.9 * len(rates)) - 1]


def cells(speeds: Sequence[Speed], plain: Sequence[Speed]) -> list[str]:
    """Best decile and median tokens a second with their ratios to plain, accepted share, tokens a pass."""
    rates, base = ([s.decode_tokens_per_second for s in each] for each in (speeds, plain))
    shares = [s.accepted_share for s in speeds if s.accepted_share is not None]
    passes = [s.tokens_per_pass for s in speeds if s.tokens_per_pass is not None]
    return [
        f"{best_decile(rates):.1f}",
        f"{best_decile(rates) / best_decile(base):.2f}x",
        f"{median(rates):.1f}",
        f"{median(rates) / median(base):.2f}x",
        f"{median(shares):.0%}" if shares else "-",
        f"{median(passes):.2f}" if passes else "-",
    ]


HEAD = ["best decile t/s", "to plain", "median t/s", "to plain", "accepted", "tokens a pass"]


def told(what: str) -> None:
    print(f"  {what}", file=sys.stderr, flush=True)


class Suite:
    """What all tables are measured with."""

    def __init__(self, device: str, threads: int | None, rounds: int, tokens: int) -> None:
        self.loading: dict[str, Any] = {"device": device, "threads": threads}
        # Layers are left out, and answers read side by side, on the CPU only.
        self.drafters = {n: d for n, d in DRAFTERS.items() if device == "cpu" or d["draft"] != "self"}
        if device != "cpu":
            self.drafters["draft model"] = {"draft": "edgeinfer-tiny-draft-5m-Q8_0.gguf"}
            del self.drafters["the same, 3 leaves"]
        self.rounds, self.tokens = rounds, tokens

    def built_in(self, open_models: ExitStack) -> Iterator[list[str]]:
        """The built-in pair: rows of text, temperature, drafter and what came of it."""
        models: dict[str, Model] = {
            name: open_models.enter_context(load("tiny", **self.loading, **self._found(drafter)))
            for name, drafter in self.drafters.items()
        }
        for text, prompt in TEXTS.items():
            for temperature in (0.0, 0.8):
                told(f"{text}, temperature {temperature}")
                settings: dict[str, Any] = {"max_tokens": self.tokens, "temperature": temperature}
                found = in_turns({n: _answer(m, prompt, settings) for n, m in models.items()}, self.rounds)
                for name, speeds in found.items():
                    yield [text, f"{temperature:g}", name, *cells(speeds, found["plain"])]

    @staticmethod
    def _found(drafter: dict[str, Any]) -> dict[str, Any]:
        """The built-in draft by its path, where it is named."""
        if not str(drafter["draft"]).endswith(".gguf"):
            return drafter
        return {**drafter, "draft": str(Path(suites.__file__).parents[1] / "builtin" / drafter["draft"])}

    def forced(self) -> Iterator[list[str]]:
        """The built-in pair with drafts of a set length, whatever they cost: tree against chain."""
        options = {**self.loading, "device": "cpu"}
        with load("tiny", draft=None, **options) as plain, load("tiny", **options) as drafting:
            speculator = drafting.speculator
            assert speculator is not None
            drafter: Any = speculator.drafter
            pace = speculator.paces["greedy"]
            settings: dict[str, Any] = {"max_tokens": self.tokens, "temperature": 0.0}

            def answer(length: int, leaves: int) -> Generation:
                drafter.leaves = leaves
                setattr(pace, "length", lambda most: max(0, min(most, length)))  # noqa: B010
                setattr(pace, "least_chances", lambda length: [0.0] * length)  # noqa: B010
                setattr(pace, "further_chances", lambda length: [0.0] * length)  # noqa: B010
                said: Generation = drafting.generate(STORY, **settings)
                return said

            sides: Sides = {"plain": lambda: plain.generate(STORY, **settings)}
            for length in (1, 2, 4):
                for leaves in (0, 1, 3):
                    name = f"{length} drafted, {leaves} leaves"
                    sides[name] = lambda k=length, n=leaves: answer(k, n)  # type: ignore[misc]
            told("tree against chain")
            found = in_turns(sides, self.rounds)
            for name, speeds in found.items():
                yield [name, *cells(speeds, found["plain"])]

    def edited(self, name: str) -> Iterator[list[str]]:
        """Code that is edited: said by script at the model's cost, looked up in the prompt or in a file."""
        with load(name, draft=None, context=2048, **self.loading) as model:
            code, edited = (model.tokenizer.encode(text)[:800] for text in (CODE, EDITED))
            settings: dict[str, Any] = {"max_tokens": len(edited) - 9, "temperature": 0.0}
            sides: Sides = {}
            for side, prompt, lookup in (
                ("plain", [*code, *edited[:8]], None),
                ("lookup in the prompt", [*code, *edited[:8]], PromptLookup()),
                ("lookup in a file", edited[:8], PromptLookup([code])),
            ):
                script = [*prompt, *edited[8:]]
                scripted = ScriptedEngine(model.engine, script)
                said = Model("script", scripted, model.tokenizer, None)
                said.speculator = _begun(scripted, lookup) if lookup else None
                sides[side] = _answer(said, prompt, settings)
            told(f"edited code, {model.name}")
            found = in_turns(sides, self.rounds)
            for side, speeds in found.items():
                yield [model.name, side, *cells(speeds, found["plain"])]

    def planted(self, path: Path, small: Path) -> Iterator[list[str]]:
        """A large random model with drafts that agree by construction, and one that never does."""
        options: dict[str, Any] = {**self.loading, "context": 512, "draft": None}
        with load(path, **options) as model, load(small, **options) as cost:
            settings: dict[str, Any] = {"max_tokens": self.tokens, "temperature": 0.0}
            ids = model.tokenizer.encode(STORY)[:8]
            plain = model.generate(ids, **settings)
            answer = [*plain.prompt_ids, *plain.ids]
            sides: Sides = {"plain": lambda: model.generate(ids, **settings)}
            for agreement in AGREEMENTS:
                speculator = _begun(model.engine, PlantedDrafter(cost.engine, answer, agreement))
                side = f"{agreement:.0%} agree"
                sides[side] = lambda s=speculator: _drafting(model, s, ids, settings)  # type: ignore[misc]
            told(f"planted, {path.stem}")
            found = in_turns(sides, self.rounds)
            for name, speeds in found.items():
                yield [path.stem, name, *cells(speeds, found["plain"])]

    def side_by_side(self, name: str | Path) -> Iterator[list[str]]:
        """Several answers at once: tokens a second of all together."""
        with load(name, draft=None, context=1024, **self.loading) as model:
            ids = model.tokenizer.encode(STORY)
            settings: dict[str, Any] = {"max_tokens": self.tokens // 2, "temperature": 0.8, "seed": 1}

            def answer(count: int) -> Generation:
                answers = model.generate(ids, n=count, **settings)
                passed = sum(a.speed.generated_tokens for a in answers) / len(answers)
                return replace(answers[0], speed=replace(answers[0].speed, generated_tokens=int(passed)))

            told(f"side by side, {model.name}")
            sides: Sides = {str(n): lambda n=n: answer(n) for n in SIDE_BY_SIDE}  # type: ignore[misc]
            found = in_turns(sides, max(2, self.rounds // 2))
            for count, speeds in found.items():
                yield [model.name, count, *cells(speeds, found["1"])[:4]]


def _answer(model: Model, prompt: str | Sequence[int], settings: dict[str, Any]) -> Answer:
    return lambda: model.generate(prompt, **settings)


def _begun(engine: Engine, drafter: Drafter) -> Speculator:
    """A speculator that has measured what it costs, as one has that is loaded for the first time."""
    engine.rewind(0)
    speculator = Speculator(engine, drafter)
    speculator.begin(speculator.measure(), {})
    return speculator


def _drafting(
    model: Model, speculator: Speculator, ids: Sequence[int], settings: dict[str, Any]
) -> Generation:
    model.speculator = speculator
    try:
        found: Generation = model.generate(ids, **settings)
        return found
    finally:
        model.speculator = None


def main() -> None:
    """Measure and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", default="tinyllama-1.1b", help="of large random models (%(default)s)")
    parser.add_argument("--type", default="Q4_0", help="(%(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (%(default)s)")
    parser.add_argument("--threads", type=int, help="(all)")
    parser.add_argument("--rounds", type=int, default=10, help="turns of each (%(default)s)")
    parser.add_argument("--tokens", type=int, default=96, help="of each answer (%(default)s)")
    parser.add_argument("--smoke", action="store_true", help="a few tokens of the built-in model")
    parser.add_argument("--out", type=Path, help="write the tables to this file too")
    options = parser.parse_args()
    rounds, tokens = (1, 8) if options.smoke else (options.rounds, options.tokens)
    suite = Suite(options.device, options.threads, rounds, tokens)
    with ExitStack() as open_models:
        pair = list(suite.built_in(open_models))
    large = [] if options.smoke else [random_file(s, options.type) for s in options.shapes.split(",")]
    models: list[Any] = ["tiny", *large[:1]]
    edited = list(suite.edited("tiny"))
    tables = [
        ("the built-in pair", markdown(["text", "temperature", "drafter", *HEAD], pair, left=(0, 2))),
        ("edited code", markdown(["model", "drafter", *HEAD], edited, left=(0, 1))),
    ]
    if options.device == "cpu":
        forced = list(suite.forced())
        several = [row for model in models for row in suite.side_by_side(model)]
        tables.append(("tree against chain, set lengths", markdown(["drafts", *HEAD], forced, left=(0,))))
        head = ["model", "answers", *(column.replace("plain", "one") for column in HEAD[:4])]
        tables.append(("answers side by side", markdown(head, several, left=(0,))))
    if large:
        small = random_file(SMALL_SHAPE, options.type)
        planted = [row for path in large for row in suite.planted(path, small)]
        tables.append(
            ("drafts that agree by construction", markdown(["model", "drafter", *HEAD], planted, left=(0, 1)))
        )
    machine = this_machine(command_line())
    suites.write_report("Speculative decoding", machine.lines(), tables, options.out)


if __name__ == "__main__":
    suites.main(main)
