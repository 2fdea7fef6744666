"""Completions with and without drafts, alternating: their speeds, ratios and ids."""

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from edgeinfer.engine.protocols import Engine
from edgeinfer.generation.request import Prompt
from edgeinfer.model import Model
from edgeinfer.planning.model_plan import model_sizes
from edgeinfer.results import Generation
from edgeinfer.speculation.draft_controller import DraftController
from edgeinfer.speculation.drafter import Drafter
from edgeinfer.speculation.speculator import Speculator
from harness.split_runs import overhead

STORY_START = "Once upon a time, there was a little girl named Lily."
PLANTED_CONTEXT = 512
"""Of models whose drafts are planted."""

Answer = Callable[[], Generation]
Variants = dict[str, Answer]


@dataclass(frozen=True)
class DraftSuite:
    """The settings of all tables."""

    device: str
    threads: int | None
    rounds: int
    tokens: int
    """Of each completion."""

    @property
    def loading(self) -> dict[str, Any]:
        """The options with which each model is loaded."""
        return {"device": self.device, "threads": self.threads}

    @property
    def greedy(self) -> dict[str, Any]:
        """The options of a greedy completion."""
        return {"max_tokens": self.tokens, "temperature": 0.0}

    def budget(self, path: Path, share: float | None) -> int | None:
        """Bytes of a GPU for a share of the weights, on top of libraries and buffers; None: all that fit."""
        if share is None:
            return None
        sizes = model_sizes(path)
        reserved = overhead(path, PLANTED_CONTEXT, self.device, self.threads, sizes)
        return reserved + int(share * sizes.nbytes)


def measured_speculator(engine: Engine, drafter: Drafter) -> Speculator:
    """A speculator with measured costs, as after the first load of a model."""
    engine.rewind(0)
    speculator = Speculator(engine, drafter)
    speculator.begin(speculator.measure(), {})
    return speculator


def draft_always(controller: DraftController, length: int) -> None:
    """Drafts of this length, whatever their cost and probability."""
    setattr(controller, "length", lambda limit: max(0, min(limit, length)))  # noqa: B010
    setattr(controller, "longest", lambda length, limit: length)  # noqa: B010
    setattr(controller, "min_probs", lambda length: (0.0, 0.0))  # noqa: B010


def answer_of(model: Model, prompt: Prompt, settings: dict[str, Any]) -> Answer:
    """Completions of a prompt."""
    return lambda: model.generate(prompt, **settings)


def alternate(variants: Variants, rounds: int) -> dict[str, list[Generation]]:
    """Each variant's completions, one per round; the first round isn't counted."""
    completions: dict[str, list[Generation]] = {name: [] for name in variants}
    for done in range(rounds + 1):
        for name, answer in variants.items():
            completion = answer()
            if done:
                completions[name].append(completion)
    return completions


def best_decile(rates: Sequence[float]) -> float:
    return sorted(rates)[math.ceil(0.9 * len(rates)) - 1]


def cells(answers: Sequence[Generation], without: Sequence[Generation]) -> list[str]:
    """Best decile and median tokens/s with their ratios to baseline, accepted share, tokens per forward."""
    speeds, baseline = ([completion.speed for completion in each] for each in (answers, without))
    rates, base = ([s.decode_tokens_per_second for s in each] for each in (speeds, baseline))
    shares = [s.accepted_share for s in speeds if s.accepted_share is not None]
    forwards = [s.tokens_per_forward for s in speeds if s.tokens_per_forward is not None]
    return [
        f"{best_decile(rates):.1f}",
        f"{best_decile(rates) / best_decile(base):.2f}x",
        f"{median(rates):.1f}",
        f"{median(rates) / median(base):.2f}x",
        f"{median(shares):.0%}" if shares else "-",
        f"{median(forwards):.2f}" if forwards else "-",
    ]


def as_baseline(answers: Sequence[Generation], without: Sequence[Generation]) -> str:
    """The number of first ids that equal those of baseline decoding."""
    expected = without[0].ids
    same = [
        next(
            (at for at, pair in enumerate(zip(completion.ids, expected, strict=False)) if pair[0] != pair[1]),
            None,
        )
        for completion in answers
    ]
    parted = [at for at in same if at is not None]
    return f"{min(parted)} of {len(expected)}" if parted else "all"


HEAD = ["best decile t/s", "to baseline", "median t/s", "to baseline", "accepted", "tokens per forward"]


def report(what: str) -> None:
    print(f"  {what}", file=sys.stderr, flush=True)


def shown(row: list[str]) -> list[str]:
    """Print the row to stderr and return it."""
    report(" | ".join(row))
    return row
