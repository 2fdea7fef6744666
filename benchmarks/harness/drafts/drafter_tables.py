"""The tables of drafters: the built-in pair by text, drafts of fixed shapes, edited code, batches and planted
drafts of a small model.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from edgeinfer.benchmarking.tables import markdown
from edgeinfer.generation.request import Prompt
from edgeinfer.loading.loading import load
from edgeinfer.model import Model
from edgeinfer.registry.registry import find_model
from edgeinfer.results import Generation
from edgeinfer.speculation.prompt_lookup import PromptLookup
from edgeinfer.speculation.trees.tree_shape import TreeShape
from harness.drafts.comparison import (
    HEAD,
    PLANTED_CONTEXT,
    STORY_START,
    Answer,
    DraftSuite,
    Variants,
    alternate,
    answer_of,
    as_baseline,
    cells,
    draft_always,
    measured_speculator,
    report,
    shown,
)
from harness.drafts.planted_drafts import PlantedDrafter, ScriptedEngine

TEXTS: dict[str, Prompt] = {
    "story": STORY_START,
    "request": [{"role": "user", "content": "Tell me a story about a brave hedgehog."}],
    "chat": 'Tom said, "Hi Sue!" Sue said, "Hi Tom! Do you want to play?" Tom said,',
    "random": "quz blorp ing ten of zz krel 7 ham",
}
CODE = "".join(
    f"def {name}_of(cart, rate):\n    total = sum(item.{name} * item.count for item in cart.items)\n"
    f"    return round(total * (1 + rate), 2)\n\n\n"
    for name in ("price", "weight", "volume", "deposit")
)
EDITED = CODE.replace("cart", "basket").replace("rate)", "rate=0.0)")
BUILTIN_DRAFT = find_model("tiny").draft_path
DRAFTERS: dict[str, dict[str, Any]] = {
    "baseline": {"draft": None},
    "draft model": {"draft": BUILTIN_DRAFT},
    "draft head": {"draft": "mtp"},
    "draft model, trees": {"draft": BUILTIN_DRAFT, "draft_tree_width": 3},
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
SIDE_BY_SIDE = (1, 2, 4, 8, 16)


def pair_table(suite: DraftSuite) -> str:
    """The built-in pair by text, temperature and drafter."""
    head = ["text", "temperature", "drafter", *HEAD, "ids as baseline"]
    with ExitStack() as open_models:
        return markdown(head, list(_pair(suite, open_models)), left=(0, 2))


def _pair(suite: DraftSuite, open_models: ExitStack) -> Iterator[list[str]]:
    models: dict[str, Model] = {
        name: open_models.enter_context(load("tiny", **suite.loading, **drafter))
        for name, drafter in _drafters(suite.device).items()
    }
    for text, prompt in TEXTS.items():
        for temperature in (0.0, 0.8):
            report(f"{text}, temperature {temperature}")
            settings: dict[str, Any] = {"max_tokens": suite.tokens, "temperature": temperature}
            completions = alternate(
                {n: answer_of(m, prompt, settings) for n, m in models.items()}, suite.rounds
            )
            for name, answers in completions.items():
                same = "-" if temperature else as_baseline(answers, completions["baseline"])
                yield shown([text, f"{temperature:g}", name, *cells(answers, completions["baseline"]), same])


def _drafters(device: str) -> dict[str, dict[str, Any]]:
    """The options of the drafters that a device supports."""
    if device == "cpu":
        return DRAFTERS
    return {
        name: options
        for name, options in DRAFTERS.items()
        if options["draft"] not in CPU_ONLY and "draft_tree_width" not in options
    }


def forced_table(suite: DraftSuite) -> str:
    """The built-in model with drafts of fixed shapes, whatever their cost: trees against chains."""
    return markdown(["drafts", *HEAD], list(_forced(suite)), left=(0,))


def _forced(suite: DraftSuite) -> Iterator[list[str]]:
    options = {**suite.loading, "device": "cpu"}
    with ExitStack() as open_models:
        baseline = open_models.enter_context(load("tiny", draft=None, **options))
        variants: Variants = {"baseline": answer_of(baseline, STORY_START, suite.greedy)}
        for drafter, draft in {"draft model": BUILTIN_DRAFT, "draft head": "mtp"}.items():
            for width in (0, 3):
                options |= {"draft": draft, "draft_tree_width": width}
                model = open_models.enter_context(load("tiny", **options))
                for shape in TREES if width else CHAINS:
                    name = f"{drafter}, {shape.depth} levels, {shape.nodes} nodes"
                    variants[name] = _of_shape(model, shape, suite.greedy)
        report("trees against chains")
        completions = alternate(variants, suite.rounds)
        for name, answers in completions.items():
            yield shown([name, *cells(answers, completions["baseline"])])


def _of_shape(model: Model, shape: TreeShape, settings: dict[str, Any]) -> Answer:
    """Completions with drafts of this shape, whatever their cost."""

    def answer() -> Generation:
        speculator = model.speculator
        assert speculator is not None
        planner = speculator.planners["greedy"]
        draft_always(speculator.controllers["greedy"], shape.depth)
        setattr(planner, "shape", lambda *given: shape._replace(depth=min(given[2], shape.depth)))  # noqa: B010
        completion: Generation = model.generate(STORY_START, **settings)
        return completion

    return answer


def edited_table(suite: DraftSuite) -> str:
    """Edited code: scripted completions at the model's cost, with lookup in the prompt or in a file."""
    return markdown(["model", "drafter", *HEAD], list(_edited(suite, "tiny")), left=(0, 1))


def _edited(suite: DraftSuite, name: str) -> Iterator[list[str]]:
    with load(name, draft=None, context=2048, **suite.loading) as model:
        code, edited = (model.tokenizer.encode(text)[:800] for text in (CODE, EDITED))
        settings = {**suite.greedy, "max_tokens": len(edited) - 9}
        variants: Variants = {}
        for side, prompt, lookup in (
            ("baseline", [*code, *edited[:8]], None),
            ("lookup in the prompt", [*code, *edited[:8]], PromptLookup()),
            ("lookup in a file", edited[:8], PromptLookup([code])),
        ):
            script = [*prompt, *edited[8:]]
            scripted = ScriptedEngine(model.engine, script)
            completion = Model("script", scripted, model.tokenizer, None)
            completion.speculator = measured_speculator(scripted, lookup) if lookup else None
            variants[side] = answer_of(completion, prompt, settings)
        report(f"edited code, {model.name}")
        completions = alternate(variants, suite.rounds)
        for side, answers in completions.items():
            yield shown([model.name, side, *cells(answers, completions["baseline"])])


def batches_table(suite: DraftSuite, models: Sequence[str | Path]) -> str:
    """Several completions at once: total tokens per second."""
    rows = [row for model in models for row in _batches(suite, model)]
    head = ["model", "answers", *(column.replace("baseline", "one") for column in HEAD[:4])]
    return markdown(head, rows, left=(0,))


def _batches(suite: DraftSuite, name: str | Path) -> Iterator[list[str]]:
    with load(name, draft=None, context=1024, **suite.loading) as model:
        ids = model.tokenizer.encode(STORY_START)
        settings: dict[str, Any] = {"max_tokens": suite.tokens // 2, "temperature": 0.8, "seed": 1}

        def answer(count: int) -> Generation:
            answers = model.generate(ids, n=count, **settings)
            passed = sum(a.speed.generated_tokens for a in answers) / len(answers)
            return replace(answers[0], speed=replace(answers[0].speed, generated_tokens=int(passed)))

        report(f"side by side, {model.name}")
        variants: Variants = {str(count): partial(answer, count) for count in SIDE_BY_SIDE}
        completions = alternate(variants, max(2, suite.rounds // 2))
        for count, answers in completions.items():
            yield shown([model.name, count, *cells(answers, completions["1"])[:4]])


def planted_table(
    suite: DraftSuite, paths: Sequence[Path], small: Path, small_device: str | None, share: float | None
) -> str:
    """Large random models with drafts of a given acceptance rate, and drafts that are never accepted.

    `share` of the weights are on the GPU, None: as many as fit. The draft is on `small_device`, or on the
    model's device.
    """
    rows = [
        row for path in paths for row in _planted(suite, path, small, small_device or suite.device, share)
    ]
    head = ["model", "weights", "draft on", "drafter", *HEAD]
    return markdown(head, rows, left=(0, 1, 2, 3))


def _planted(
    suite: DraftSuite, path: Path, small: Path, small_device: str, share: float | None
) -> Iterator[list[str]]:
    """All variants generate the baseline ids: a forward of several tokens can have other bits, and a random
    model would soon generate other tokens.
    """
    # With a drafter, steps of every token count are captured.
    options: dict[str, Any] = {**suite.loading, "context": PLANTED_CONTEXT, "draft": "lookup"}
    with (
        load(path, vram=suite.budget(path, share), **options) as model,
        load(small, **{**options, "device": small_device}) as cost,
    ):
        for note in model.warnings:
            report(str(note))
        model.speculator = None
        ids = model.tokenizer.encode(STORY_START)[:8]
        baseline = model.generate(ids, **suite.greedy)
        script = [*baseline.prompt_ids, *baseline.ids]
        engine = ScriptedEngine(model.engine, script)
        variants: Variants = {}
        for name, agreement in {"baseline": None, **{f"{a:.0%} agree": a for a in AGREEMENTS}}.items():
            completion = Model(model.name, engine, model.tokenizer, None)
            if agreement is not None:
                drafter = PlantedDrafter(cost.engine, script, agreement)
                completion.speculator = measured_speculator(engine, drafter)
            variants[name] = answer_of(completion, ids, suite.greedy)
        report(f"planted, {path.stem}")
        completions = alternate(variants, suite.rounds)
        placed = "all" if share is None else f"{share:.0%} on the GPU"
        for name, answers in completions.items():
            yield shown([path.stem, placed, small_device, name, *cells(answers, completions["baseline"])])
