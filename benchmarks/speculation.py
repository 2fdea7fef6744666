"""Baseline decoding against drafting, alternating: the built-in pair by text, edited code, planted and
simulated drafts.

python benchmarks/speculation.py --shapes tinyllama-1.1b,llama-3.2-3b --threads 2 --rounds 10
python benchmarks/speculation.py --device cuda --shapes llama-3-8b --share 0.5 --tables planted
python benchmarks/speculation.py --device cuda --head-shapes llama-3.1-8b+mtp --share 0.5 --tables heads
python benchmarks/speculation.py --tables agreeing --head-shapes qwen3.5-4b+mtp --llama-speculative PATH
"""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import edgeinfer
from edgeinfer.benchmarking.machine import command_line, this_machine
from edgeinfer.benchmarking.random_files import random_file, random_files_folder
from edgeinfer.benchmarking.tables import markdown
from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.engine.protocols import Engine
from edgeinfer.errors import SettingError
from edgeinfer.loading.loading import load
from edgeinfer.model import Model
from edgeinfer.planning.model_plan import model_sizes
from edgeinfer.results import Generation
from edgeinfer.speculation.drafter import Drafter
from edgeinfer.speculation.prompt_lookup import PromptLookup
from edgeinfer.speculation.speculator import Speculator
from edgeinfer.speculation.trees.tree_pass import TreePass
from edgeinfer.speculation.trees.tree_shape import TreeShape
from harness import suites
from harness.drafts import simulated_drafts
from harness.drafts.against_llama_cpp import Comparison
from harness.drafts.agreeing_head import agreeing_file
from harness.drafts.comparison import (
    HEAD,
    Answer,
    Variants,
    alternate,
    answer_of,
    as_baseline,
    cells,
    report,
    shown,
)
from harness.drafts.planted_drafts import (
    PlantedDrafter,
    PlantedHead,
    PlantedTrees,
    ScriptedEngine,
    ScriptedSampler,
    ScriptedTrees,
)
from harness.drafts.timed_drafts import AGREEMENTS as HEADS
from harness.drafts.timed_drafts import timed_table
from harness.split_runs import overhead

STORY_START = "Once upon a time, there was a little girl named Lily."
TEXTS = {
    "story": STORY_START,
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
    "baseline": {"draft": None},
    "draft model": {"draft": "auto"},
    "draft head": {"draft": "mtp"},
    "draft model, trees": {"draft": "auto", "draft_tree_width": 3},
    "draft head, trees": {"draft": "mtp", "draft_tree_width": 3},
    "lookup": {"draft": "lookup"},
    "self": {"draft": "self"},
}
CPU_ONLY = ("self",)
"""Layer skipping."""
CHAINS = (TreeShape(1, 1), TreeShape(3, 3), TreeShape(5, 5), TreeShape(7, 7))
TREES = (TreeShape(3, 7), TreeShape(5, 7), TreeShape(5, 12), TreeShape(7, 15))
"""Levels and tokens of drafts of a fixed shape."""
AGREEMENTS = (0.9, 0.7, 0.5, 0.0)
HEAD_WIDTH = 3
"""Candidates besides the first of planted trees."""
TABLES = ("pair", "edited", "forced", "several", "planted", "heads", "agreeing", "simulated")
PLANTED_CONTEXT = 512
SIMULATED = (600, 5)
"""Tokens of a simulated completion, and seeds."""
TIMED = (128, 16)
"""Tokens of a completion in simulated time, and rounds."""
SIDE_BY_SIDE = (1, 2, 4, 8, 16)


class Suite:
    """Settings of all tables."""

    def __init__(self, device: str, threads: int | None, rounds: int, tokens: int) -> None:
        self.device, self.threads = device, threads
        self.loading: dict[str, Any] = {"device": device, "threads": threads}
        self.drafters = {n: d for n, d in DRAFTERS.items() if device == "cpu" or d["draft"] not in CPU_ONLY}
        if device != "cpu":
            self.drafters["draft model"] = {"draft": "edgeinfer-tiny-draft-5m-Q8_0.gguf"}
            self.drafters = {n: d for n, d in self.drafters.items() if "draft_tree_width" not in d}
        self.rounds, self.tokens = rounds, tokens

    def built_in(self, open_models: ExitStack) -> Iterator[list[str]]:
        """The built-in pair: rows of text, temperature, drafter and results."""
        models: dict[str, Model] = {
            name: open_models.enter_context(load("tiny", **self.loading, **self._found(drafter)))
            for name, drafter in self.drafters.items()
        }
        for text, prompt in TEXTS.items():
            for temperature in (0.0, 0.8):
                report(f"{text}, temperature {temperature}")
                settings: dict[str, Any] = {"max_tokens": self.tokens, "temperature": temperature}
                completions = alternate(
                    {n: answer_of(m, prompt, settings) for n, m in models.items()}, self.rounds
                )
                for name, answers in completions.items():
                    same = "-" if temperature else as_baseline(answers, completions["baseline"])
                    yield shown(
                        [text, f"{temperature:g}", name, *cells(answers, completions["baseline"]), same]
                    )

    @staticmethod
    def _found(drafter: dict[str, Any]) -> dict[str, Any]:
        """The path of the built-in draft model, for runs that name it."""
        if not str(drafter["draft"]).endswith(".gguf"):
            return drafter
        return {**drafter, "draft": str(Path(edgeinfer.__file__).parent / "builtin" / drafter["draft"])}

    def forced(self) -> Iterator[list[str]]:
        """The built-in model with drafts of fixed shapes, whatever their cost: trees against chains."""
        options = {**self.loading, "device": "cpu"}
        settings: dict[str, Any] = {"max_tokens": self.tokens, "temperature": 0.0}
        with ExitStack() as open_models:
            baseline = open_models.enter_context(load("tiny", draft=None, **options))
            variants: Variants = {"baseline": lambda: baseline.generate(STORY_START, **settings)}
            for drafter, draft in {"draft model": "auto", "draft head": "mtp"}.items():
                for width in (0, 3):
                    options |= {"draft": draft, "draft_tree_width": width}
                    model = open_models.enter_context(load("tiny", **options))
                    for shape in TREES if width else CHAINS:
                        name = f"{drafter}, {shape.depth} levels, {shape.nodes} nodes"
                        variants[name] = _of_shape(model, shape, settings)
            report("trees against chains")
            completions = alternate(variants, self.rounds)
            for name, answers in completions.items():
                yield shown([name, *cells(answers, completions["baseline"])])

    def edited(self, name: str) -> Iterator[list[str]]:
        """Edited code: scripted completions at the model's cost, with lookup in the prompt or in a file."""
        with load(name, draft=None, context=2048, **self.loading) as model:
            code, edited = (model.tokenizer.encode(text)[:800] for text in (CODE, EDITED))
            settings: dict[str, Any] = {"max_tokens": len(edited) - 9, "temperature": 0.0}
            variants: Variants = {}
            for side, prompt, lookup in (
                ("baseline", [*code, *edited[:8]], None),
                ("lookup in the prompt", [*code, *edited[:8]], PromptLookup()),
                ("lookup in a file", edited[:8], PromptLookup([code])),
            ):
                script = [*prompt, *edited[8:]]
                scripted = ScriptedEngine(model.engine, script)
                completion = Model("script", scripted, model.tokenizer, None)
                completion.speculator = _measured_speculator(scripted, lookup) if lookup else None
                variants[side] = answer_of(completion, prompt, settings)
            report(f"edited code, {model.name}")
            completions = alternate(variants, self.rounds)
            for side, answers in completions.items():
                yield shown([model.name, side, *cells(answers, completions["baseline"])])

    def planted(
        self, path: Path, small: Path, small_device: str | None, share: float | None
    ) -> Iterator[list[str]]:
        """A large random model with drafts of a given acceptance rate, and drafts that are never accepted.

        `share` of its weights are on the GPU, None: as many as fit. The draft is on `small_device`, or on the
        model's device. All sides generate the baseline ids: a forward of
        several tokens can have other bits, and a random model would soon generate other tokens.
        """
        # With a drafter, steps of every token count are captured.
        options: dict[str, Any] = {**self.loading, "context": PLANTED_CONTEXT, "draft": "lookup"}
        vram = None if share is None else self._budget(path, share)
        small_device = small_device or self.device
        with (
            load(path, vram=vram, **options) as model,
            load(small, **{**options, "device": small_device}) as cost,
        ):
            for note in model.warnings:
                report(note)
            model.speculator = None
            settings: dict[str, Any] = {"max_tokens": self.tokens, "temperature": 0.0}
            ids = model.tokenizer.encode(STORY_START)[:8]
            baseline = model.generate(ids, **settings)
            script = [*baseline.prompt_ids, *baseline.ids]
            engine = ScriptedEngine(model.engine, script)
            variants: Variants = {}
            for name, agreement in {"baseline": None, **{f"{a:.0%} agree": a for a in AGREEMENTS}}.items():
                completion = Model(model.name, engine, model.tokenizer, None)
                if agreement is not None:
                    completion.speculator = _measured_speculator(
                        engine, PlantedDrafter(cost.engine, script, agreement)
                    )
                variants[name] = answer_of(completion, ids, settings)
            report(f"planted, {path.stem}")
            completions = alternate(variants, self.rounds)
            placed = "all" if share is None else f"{share:.0%} on the GPU"
            for name, answers in completions.items():
                yield shown([path.stem, placed, small_device, name, *cells(answers, completions["baseline"])])

    def own_head(self) -> Iterator[list[str]]:
        """The built-in model with its head: drafts as the controller and the planner select them."""
        given: dict[str, dict[str, Any]] = {"baseline": {"draft": None}, "its head, chains": {"draft": "mtp"}}
        given["its head, trees"] = {"draft": "mtp", "draft_tree_width": HEAD_WIDTH}
        settings: dict[str, Any] = {"max_tokens": self.tokens, "temperature": 0.0}
        with ExitStack() as open_models:
            variants: Variants = {}
            for name, options in given.items():
                model = open_models.enter_context(load("tiny", **self.loading, **options))
                size = model.speculator.drafter.nbytes if model.speculator else 0
                variants[name] = answer_of(model, STORY_START, settings)
            report("the built-in model with its head")
            completions = alternate(variants, self.rounds)
            for name, answers in completions.items():
                row = ["tiny", f"{size / 1e6:.0f} MB", "-", name]
                yield shown([*row, *cells(answers, completions["baseline"])])

    def heads(self, path: str | Path, share: float | None = None) -> Iterator[list[str]]:
        """A model with the draft head of its file, in chains and in trees. At its cost tokens are drafted
        that are right as often as those of published heads, or never.

        The model's tokens don't depend on its cache (`agreeing_file`), so that every variant samples those of
        the script: a random model selects others as soon as a forward of several tokens has other bits, and
        then steps that a GPU started ahead are repeated. `share`: as for `planted`.
        """
        options: dict[str, Any] = {**self.loading, "context": PLANTED_CONTEXT, "draft_tree_width": HEAD_WIDTH}
        if share is not None:
            options["vram"] = self._budget(Path(path), share)
        with load(path, draft="mtp", **options) as model:
            for note in model.warnings:
                report(str(note))
            assert model.speculator is not None
            head, engine, model.speculator = model.speculator.drafter, model.engine, None
            if not head.hidden_layers:
                raise SettingError(f"--tables heads: {model.name}: {' '.join(map(str, model.warnings))}")
            settings: dict[str, Any] = {"max_tokens": self.tokens, "temperature": 0.0}
            ids = model.tokenizer.encode(STORY_START)[:8]
            baseline = model.generate(ids, **settings)
            script = [*baseline.prompt_ids, *baseline.ids]
            scripted: Engine = ScriptedEngine(engine, script)
            if can_branch := bool(TreePass.max_nodes(engine)) and isinstance(engine, NativeEngine):
                scripted = ScriptedTrees(engine, script)
            variants: Variants = {"baseline": _observed(model.name, scripted, model, None, ids, settings)}
            planted = dict[str, PlantedHead]()
            for name, agreements in HEADS.items():
                for kind in (PlantedHead, PlantedTrees)[: 1 + can_branch]:
                    drafts = f"{name}, {'trees' if kind is PlantedTrees else 'chains'}"
                    planted[drafts] = kind(head, script, agreements, engine.vocabulary_size)
                    variants[drafts] = _observed(model.name, scripted, model, planted[drafts], ids, settings)
            report(f"planted heads, {model.name}, {head.nbytes / 1e6:.0f} MB")
            for drafter in planted.values():
                drafter.requests = drafter.short_requests = 0
            ScriptedSampler.others = 0
            completions = alternate(variants, self.rounds)
            size, covered = f"{head.nbytes / 1e6:.0f} MB", _covered(baseline.ids, head.short_vocabulary)
            placed = model.name if share is None else f"{model.name}, {share:.0%} on the GPU"
            for name, answers in completions.items():
                yield shown([placed, size, covered, name, *cells(answers, completions["baseline"])])
            for name, drafter in planted.items():
                each = drafter.requests / (1 + self.rounds)
                short = drafter.short_requests / max(1, drafter.requests)
                report(f"{name}: {each:.0f} drafts a completion, {short:.0%} of the short vocabulary")
            report(f"{ScriptedSampler.others} tokens were sampled that aren't those of the script")

    def _budget(self, path: Path, share: float) -> int:
        """Bytes of a GPU for a share of the weights, on top of libraries and buffers."""
        sizes = model_sizes(path)
        reserved = overhead(path, PLANTED_CONTEXT, self.device, self.threads, sizes)
        return reserved + int(share * sizes.nbytes)

    def batches(self, name: str | Path) -> Iterator[list[str]]:
        """Several completions at once: total tokens per second."""
        with load(name, draft=None, context=1024, **self.loading) as model:
            ids = model.tokenizer.encode(STORY_START)
            settings: dict[str, Any] = {"max_tokens": self.tokens // 2, "temperature": 0.8, "seed": 1}

            def answer(count: int) -> Generation:
                answers = model.generate(ids, n=count, **settings)
                passed = sum(a.speed.generated_tokens for a in answers) / len(answers)
                return replace(answers[0], speed=replace(answers[0].speed, generated_tokens=int(passed)))

            report(f"side by side, {model.name}")
            variants: Variants = {str(n): lambda n=n: answer(n) for n in SIDE_BY_SIDE}  # type: ignore[misc]
            completions = alternate(variants, max(2, self.rounds // 2))
            for count, answers in completions.items():
                yield shown([model.name, count, *cells(answers, completions["1"])[:4]])


def _covered(ids: Sequence[int], short: int) -> str:
    """The share of a text's tokens that are in a short draft vocabulary."""
    return f"{sum(token < short for token in ids) / len(ids):.1%} of {short:,}" if short else "-"


def _of_shape(model: Model, shape: TreeShape, settings: dict[str, Any]) -> Answer:
    """Completions with drafts of this shape, whatever their cost."""

    def answer() -> Generation:
        speculator = model.speculator
        assert speculator is not None
        controller, planner = speculator.controllers["greedy"], speculator.planners["greedy"]
        setattr(controller, "length", lambda most: max(0, min(most, shape.depth)))  # noqa: B010
        setattr(controller, "min_probs", lambda length: (0.0, 0.0))  # noqa: B010
        setattr(planner, "shape", lambda *given: shape._replace(depth=min(given[2], shape.depth)))  # noqa: B010
        completion: Generation = model.generate(STORY_START, **settings)
        return completion

    return answer


def _observed(
    name: str,
    engine: Engine,
    of: Model,
    drafter: Drafter | None,
    prompt: Sequence[int],
    settings: dict[str, Any],
) -> Answer:
    """As `_answer`, for a scripted engine of a model; the drafter is the only one that observes the engine,
    which several share.
    """
    model = Model(name, engine, of.tokenizer, None)
    if drafter is not None:
        model.speculator = _measured_speculator(engine, drafter)

    def answer() -> Generation:
        if drafter is None:
            engine.hand_out((), lambda step: None)
        else:
            engine.hand_out(drafter.hidden_layers, drafter.observe)
        completion: Generation = model.generate(prompt, **settings)
        return completion

    return answer


def _measured_speculator(engine: Engine, drafter: Drafter) -> Speculator:
    """A speculator with measured costs, as after the first load of a model."""
    engine.rewind(0)
    speculator = Speculator(engine, drafter)
    speculator.begin(speculator.measure(), {})
    return speculator


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
    suite = Suite(options.device, options.threads, rounds, tokens)
    tables = _tables(suite, options, requested_tables(options))
    suites.write_report("Speculative decoding", this_machine(command_line()).lines(), tables, options.out)


def requested_tables(options: argparse.Namespace) -> set[str]:
    """The requested tables that this machine can measure. Raises `SettingError`."""
    names = set(suites.words(options.tables))
    if wrong := sorted(names - set(TABLES)):
        raise SettingError(f"--tables: saw {wrong[0]!r}, wanted some of {', '.join(TABLES)}")
    if options.device != "cpu":  # without support for trees and batches
        names -= {"forced", "several"}
    return names - {"planted", "agreeing"} if options.smoke else names


def _tables(suite: Suite, options: argparse.Namespace, expected: set[str]) -> list[tuple[str, str]]:
    """Heads and tables."""
    tables = list[tuple[str, str]]()
    large = []
    if expected & {"several", "planted"} and not options.smoke:
        large = [random_file(shape, options.type) for shape in suites.words(options.shapes)]
    if "pair" in expected:
        with ExitStack() as open_models:
            rows = list(suite.built_in(open_models))
        head = ["text", "temperature", "drafter", *HEAD, "ids as baseline"]
        tables.append(("the built-in pair", markdown(head, rows, left=(0, 2))))
    if "edited" in expected:
        rows = list(suite.edited("tiny"))
        tables.append(("edited code", markdown(["model", "drafter", *HEAD], rows, left=(0, 1))))
    if "forced" in expected:
        rows = list(suite.forced())
        tables.append(("tree against chain, fixed lengths", markdown(["drafts", *HEAD], rows, left=(0,))))
    if "several" in expected:
        models: list[str | Path] = ["tiny", *large[:1]]
        rows = [row for model in models for row in suite.batches(model)]
        head = ["model", "answers", *(column.replace("baseline", "one") for column in HEAD[:4])]
        tables.append(("completions as a batch", markdown(head, rows, left=(0,))))
    if "planted" in expected:
        small = _small_file(options.draft_shape, options.type)
        where = options.draft_device, options.share
        rows = [row for path in large for row in suite.planted(path, small, *where)]
        head = ["model", "weights", "draft on", "drafter", *HEAD]
        tables.append(("drafts with a given acceptance rate", markdown(head, rows, left=(0, 1, 2, 3))))
    if "heads" in expected:
        shapes = [] if options.smoke else suites.words(options.head_shapes)
        files: list[str | Path] = list(_agreeing_files(shapes, options)) or ["tiny"]
        rows = [*suite.own_head()] if suite.device == "cpu" else []
        rows += [row for file in files for row in suite.heads(file, options.share)]
        head = ["model", "head", "tokens in the short vocabulary", "drafter", *HEAD]
        tables.append(("draft heads with given acceptance rates", markdown(head, rows, left=(0, 1, 2, 3))))
    if "agreeing" in expected:
        comparison = Comparison(suite.loading, suite.rounds, suite.tokens, options.llama_speculative)
        agreeing = _agreeing_files(suites.words(options.head_shapes), options)
        rows = [row for file in agreeing for row in comparison.rows(file)]
        head = ["model", "program", "drafts", *HEAD]
        tables.append(("heads that agree by their weights", markdown(head, rows, left=(0, 1, 2))))
    if "simulated" in expected:
        tables += simulated_drafts.tables(*((60, 1) if options.smoke else SIMULATED))
        timed = timed_table(*((16, 1) if options.smoke else TIMED))
        tables.append(("simulated: planted heads with the costs of an H100", timed))
    return tables


def _agreeing_files(shapes: Sequence[str], options: argparse.Namespace) -> Iterator[Path]:
    """The files of models whose heads agree by their weights."""
    for shape in shapes:
        yield agreeing_file(shape, options.type, options.agreement, options.selected)


def _small_file(shape: str, kind: str) -> Path:
    """The random file of a shape, or of the first layers of one."""
    if ":" not in shape:
        return random_file(shape, kind)
    folder = random_files_folder()
    folder.mkdir(parents=True, exist_ok=True)
    return suites.written_shape(f"{shape}:{kind}", folder)


if __name__ == "__main__":
    suites.main(main)
