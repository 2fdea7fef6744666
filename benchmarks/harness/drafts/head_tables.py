"""The tables of draft heads: heads whose tokens are right as often as those of published ones, and heads that
agree with their model by their weights.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from edgeinfer.benchmarking.tables import markdown
from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.engine.protocols import Engine
from edgeinfer.errors import SettingError
from edgeinfer.loading.loading import load
from edgeinfer.model import Model
from edgeinfer.results import Generation
from edgeinfer.speculation.drafter import Drafter
from edgeinfer.speculation.trees.tree_pass import TreePass
from harness.drafts.against_llama_cpp import Comparison
from harness.drafts.comparison import (
    HEAD,
    PLANTED_CONTEXT,
    STORY_START,
    Answer,
    DraftSuite,
    Variants,
    alternate,
    answer_of,
    cells,
    measured_speculator,
    report,
    shown,
)
from harness.drafts.planted_drafts import (
    PlantedHead,
    PlantedTrees,
    ScriptedEngine,
    ScriptedSampler,
    ScriptedTrees,
)
from harness.drafts.timed_drafts import AGREEMENTS

TREE_WIDTH = 3
"""Candidates besides the first of planted trees."""


def heads_table(suite: DraftSuite, models: Sequence[str | Path], share: float | None) -> str:
    """Draft heads with given acceptance rates; on a CPU also the built-in model with its head."""
    rows = [*_builtin_head(suite)] if suite.device == "cpu" else []
    rows += [row for model in models for row in planted_head(suite, model, share)]
    head = ["model", "head", "tokens in the short vocabulary", "drafter", *HEAD]
    return markdown(head, rows, left=(0, 1, 2, 3))


def agreeing_table(suite: DraftSuite, paths: Sequence[Path], llama_speculative: Path | None) -> str:
    """Heads that agree by their weights, with `llama_speculative` in llama.cpp too."""
    comparison = Comparison(suite, llama_speculative)
    rows = [row for path in paths for row in comparison.rows(path)]
    return markdown(["model", "program", "drafts", *HEAD], rows, left=(0, 1, 2))


def _builtin_head(suite: DraftSuite) -> Iterator[list[str]]:
    """The built-in model with its head: drafts as the controller and the planner select them."""
    given: dict[str, dict[str, Any]] = {"baseline": {"draft": None}, "its head, chains": {"draft": "mtp"}}
    given["its head, trees"] = {"draft": "mtp", "draft_tree_width": TREE_WIDTH}
    with ExitStack() as open_models:
        variants: Variants = {}
        for name, options in given.items():
            model = open_models.enter_context(load("tiny", **suite.loading, **options))
            size = model.speculator.drafter.nbytes if model.speculator else 0
            variants[name] = answer_of(model, STORY_START, suite.greedy)
        report("the built-in model with its head")
        completions = alternate(variants, suite.rounds)
        for name, answers in completions.items():
            row = ["tiny", f"{size / 1e6:.0f} MB", "-", name]
            yield shown([*row, *cells(answers, completions["baseline"])])


def planted_head(suite: DraftSuite, path: str | Path, share: float | None = None) -> Iterator[list[str]]:
    """The rows of a model with the draft head of its file, in chains and in trees. At its cost tokens are
    drafted that are right as often as those of published heads, or never. `share` of its weights are on the
    GPU, None: as many as fit.

    The model's tokens don't depend on its cache (`agreeing_file`), so that every variant samples those of
    the script: a random model selects others as soon as a forward of several tokens has other bits, and
    then steps that a GPU started ahead are repeated.
    """
    options: dict[str, Any] = {**suite.loading, "context": PLANTED_CONTEXT, "draft_tree_width": TREE_WIDTH}
    if share is not None:
        options["vram"] = suite.budget(Path(path), share)
    with load(path, draft="mtp", **options) as model:
        for note in model.warnings:
            report(str(note))
        head = _taken_head(model)
        ids = model.tokenizer.encode(STORY_START)[:8]
        baseline = model.generate(ids, **suite.greedy)
        script = [*baseline.prompt_ids, *baseline.ids]
        scripted = _scripted(model.engine, script)
        planted = _planted_heads(head, script, scripted)
        variants: Variants = {"baseline": _observed(scripted, model, None, ids, suite.greedy)}
        variants |= {
            name: _observed(scripted, model, drafter, ids, suite.greedy) for name, drafter in planted.items()
        }
        size = f"{head.nbytes / 1e6:.0f} MB"
        report(f"planted heads, {model.name}, {size}")
        _forget_counts(planted)
        completions = alternate(variants, suite.rounds)
        covered = _covered(baseline.ids, head.short_vocabulary)
        placed = model.name if share is None else f"{model.name}, {share:.0%} on the GPU"
        for name, answers in completions.items():
            yield shown([placed, size, covered, name, *cells(answers, completions["baseline"])])
        _report_counts(planted, 1 + suite.rounds)


def _taken_head(model: Model) -> Drafter:
    """The head of a model, which no longer drafts with it. Raises `SettingError`."""
    assert model.speculator is not None
    head, model.speculator = model.speculator.drafter, None
    if not head.hidden_layers:
        raise SettingError(f"--tables heads: {model.name}: {' '.join(map(str, model.warnings))}")
    return head


def _scripted(engine: Engine, script: Sequence[int]) -> Engine:
    """An engine that samples the script's tokens."""
    if isinstance(engine, NativeEngine):
        return ScriptedTrees(engine, script)
    return ScriptedEngine(engine, script)


def _planted_heads(head: Drafter, script: Sequence[int], engine: Engine) -> dict[str, PlantedHead]:
    """Heads of each acceptance rate, for chains and, if the engine supports them, for trees."""
    kinds = {"chains": PlantedHead}
    if TreePass.max_nodes(engine):
        kinds["trees"] = PlantedTrees
    scripted = engine if isinstance(engine, ScriptedTrees) else None
    return {
        f"{name}, {drafts}": kind(head, script, agreements, engine.vocabulary_size, scripted)
        for name, agreements in AGREEMENTS.items()
        for drafts, kind in kinds.items()
    }


def _observed(
    engine: Engine, of: Model, drafter: Drafter | None, prompt: Sequence[int], settings: dict[str, Any]
) -> Answer:
    """As `answer_of`, for a scripted engine of a model; the drafter is the only one that observes the engine,
    which several share.
    """
    model = Model(of.name, engine, of.tokenizer, None)
    if drafter is not None:
        model.speculator = measured_speculator(engine, drafter)

    def answer() -> Generation:
        if drafter is None:
            engine.hand_out((), lambda step: None)
        else:
            engine.hand_out(drafter.hidden_layers, drafter.observe)
        completion: Generation = model.generate(prompt, **settings)
        return completion

    return answer


def _forget_counts(planted: dict[str, PlantedHead]) -> None:
    """Don't count what measuring the costs drafted."""
    for drafter in planted.values():
        drafter.requests = drafter.short_requests = 0
    ScriptedSampler.others = 0


def _report_counts(planted: dict[str, PlantedHead], completions: int) -> None:
    for name, drafter in planted.items():
        each = drafter.requests / completions
        short = drafter.short_requests / max(1, drafter.requests)
        report(f"{name}: {each:.0f} drafts a completion, {short:.0%} of the short vocabulary")
    report(f"{ScriptedSampler.others} tokens were sampled that aren't those of the script")


def _covered(ids: Sequence[int], short: int) -> str:
    """The share of a text's tokens that are in a short draft vocabulary."""
    return f"{sum(token < short for token in ids) / len(ids):.1%} of {short:,}" if short else "-"
