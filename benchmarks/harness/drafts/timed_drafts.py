"""Planted heads in simulated time: the built-in model computes, and a clock advances as a GPU would need.

Everything that decides about drafts is as in a completion on a GPU: the controller, the planner of trees, and
which steps the device starts ahead.
"""

import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from edgeinfer.benchmarking.tables import markdown
from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.engine.protocols import TokenSampler
from edgeinfer.loading.loading import load
from edgeinfer.model import Model
from edgeinfer.sampling import Sampler
from edgeinfer.speculation.draft_costs import MAX_DRAFTED
from edgeinfer.speculation.drafter import Draft, Drafter, DraftRequest
from edgeinfer.speculation.speculator import Speculator
from harness.drafts.comparison import best_decile, draft_always
from harness.drafts.planted_drafts import PlantedHead, PlantedTrees, ScriptedTrees
from harness.drafts.simulated_drafts import AS_PUBLISHED

AGREEMENTS = {"as published": AS_PUBLISHED, "90% agree": (0.9,), "useless": (0.0,)}
LENGTHS = (1, 2, 3, 4, 5)
PROMPT, FIRST, LAST = 8, 1000, 8000
"""Tokens of the prompt; the ids of a text are from FIRST to LAST."""
WIDTH = 4
"""Candidates after a token of a tree."""
DISTURBED, DELAY = 0.02, 0.5
"""How often a step of the GPU is late, and by what share."""


@dataclass(frozen=True)
class GpuCosts:
    """Seconds of a step of one token that was started ahead; those of several tokens, as the host sees them,
    relative to it; a draft token relative to it; seconds of a draft independent of its length, and of the
    host's part of a step of one token that isn't started ahead.
    """

    one: float
    forwards: Mapping[int, float]
    token: float
    draft: float
    host: float = 140e-6
    catching_up: float = 1.8e-3
    """Seconds in which a head reads what it missed, up to 64 tokens."""
    first: float = 10e-3
    """Seconds that it takes longer when the head first does that: kernels are compiled or loaded."""

    def forward(self, tokens: int) -> float:
        known = sorted(self.forwards)
        return self.one * float(np.interp(tokens, known, [self.forwards[each] for each in known]))


H100 = {
    "qwen3.5-4b": GpuCosts(1 / 717, {1: 1, 2: 1.10, 4: 1.41, 8: 2.25, 16: 3.4}, 0.20, 250e-6),
    "llama-3.1-8b": GpuCosts(1 / 550, {1: 1, 2: 1.25, 3: 1.30, 4: 1.31, 8: 2.05, 16: 3.1}, 0.105, 300e-6),
}
"""Measured on an H100, except for 16 tokens."""


class Clock:
    """The simulated time."""

    seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@contextmanager
def simulated_time(clock: Clock) -> Iterator[None]:
    """What the program times in this context passes on this clock."""
    before = time.perf_counter
    setattr(time, "perf_counter", clock)  # noqa: B010
    try:
        yield
    finally:
        setattr(time, "perf_counter", before)  # noqa: B010


class TimedTrees(ScriptedTrees):
    """A scripted engine whose steps take the time of a GPU's."""

    def __init__(self, engine: NativeEngine, script: Sequence[int], costs: GpuCosts, clock: Clock) -> None:
        super().__init__(engine, script)
        self.costs, self._clock, self._random = costs, clock, random.Random(2)
        self._ahead: int | None = None
        """The length of the text of the step that was started ahead."""

    def begin(self, seed: int) -> None:
        """Begin the series of disturbed steps with this seed."""
        self._random = random.Random(seed)

    def wait(self) -> None:
        """Wait for a step that was started ahead in vain."""
        if self._ahead is not None:
            self._pass(self.costs.one)
        self._ahead = None

    def _pass(self, seconds: float) -> None:
        late = self._random.random() < DISTURBED
        self._clock.seconds += seconds * (1 + DELAY * late)

    def _step_of(self, tokens: int) -> None:
        self.wait()
        self._pass(self.costs.forward(tokens) + self.costs.host * (tokens == 1))

    def append_best(self, ids: Sequence[int]) -> list[int] | None:
        """As the scripted engine's."""
        self._step_of(len(ids))
        return super().append_best(ids)

    def best_of_tree(self, ids: Sequence[int], parents: Sequence[int]) -> list[int] | None:
        """As the scripted engine's."""
        self._step_of(len(ids))
        return super().best_of_tree(ids, parents)

    def next(self, history: Sequence[int], ahead: bool) -> int:
        """A step of the last token of a text, as the GPU samples."""
        if self._ahead == len(history):
            self._pass(self.costs.one)
        else:
            self._step_of(1)
        self._ahead = len(history) + 1 if ahead else None
        self.append(history[-1:])
        return self._following([len(history)])[0]

    def device_sampler(self, sampler: Sampler) -> TokenSampler:
        """The GPU samples."""
        return _TimedSampler(self)


class _TimedSampler:
    def __init__(self, engine: TimedTrees) -> None:
        self._engine = engine

    def next(self, history: Sequence[int], ahead: bool = True) -> int:
        return self._engine.next(history, ahead)


class TimedHead(Drafter):
    """A head on a GPU whose drafts take their time. `width`: of its trees; 1: it drafts chains."""

    name = "timed head"

    def __init__(self, engine: TimedTrees, clock: Clock, width: int) -> None:
        self._engine, self._clock, self._width = engine, clock, width
        self._read = 0
        """Tokens of the text that it has read."""
        self._first = engine.costs.first

    @property
    def tree_width(self) -> int:
        return self._width

    def propose(self, history: Sequence[int], request: DraftRequest) -> Draft:
        """Tokens that aren't those of the text."""
        self._engine.wait()
        costs, levels = self._engine.costs, request.max_tokens
        rows = [1] * levels
        if request.max_nodes:  # a level has the tokens of all levels before it, after the root
            rows = [1, *(min(WIDTH * level, request.max_nodes) for level in range(1, levels))]
        self._clock.seconds += sum(costs.token * costs.forward(each) for each in rows)
        self._clock.seconds += costs.draft + costs.host / 2 * (len(rows) - 1) * (request.max_nodes > 0)
        if len(history) - self._read > 1 + MAX_DRAFTED:
            self._clock.seconds += costs.catching_up + self._first
            self._first = 0.0
        self._read = len(history)
        return Draft((0,) * levels, made=levels)


class Timing:
    """Completions of `tokens` tokens of a model, of any size, with the costs of a GPU."""

    def __init__(self, model: Model, costs: GpuCosts, tokens: int, rounds: int) -> None:
        assert isinstance(model.engine, NativeEngine)
        drawn = random.Random(1)
        last = min(LAST, model.engine.vocabulary_size)
        ids = [each for each in range(min(FIRST, last // 2), last) if each not in model.tokenizer.end_ids]
        self._script = drawn.choices(ids, k=PROMPT + tokens)
        self._model, self._clock, self._tokens, self._rounds = model, Clock(), tokens, rounds
        self._engine = TimedTrees(model.engine, self._script, costs, self._clock)

    def rates(
        self, kind: type[PlantedHead] | None, agreements: Sequence[float], length: int = 0, seed: int = 1
    ) -> list[float]:
        """Tokens per second of each completion after loading with such drafts, of constant `length` if that
        is given.
        """
        model = Model("timed", self._engine, self._model.tokenizer, None)
        with simulated_time(self._clock):
            if kind is not None:
                self._engine.begin(seed)
                model.speculator = self._speculator(kind, agreements, length, seed)
            settings: dict[str, Any] = {"max_tokens": self._tokens, "temperature": 0.0}
            speeds = [model.generate(self._script[:PROMPT], **settings).speed for _ in range(self._rounds)]
        return [each.decode_tokens_per_second for each in speeds]

    def _speculator(
        self, kind: type[PlantedHead], agreements: Sequence[float], length: int, seed: int
    ) -> Speculator:
        head = TimedHead(self._engine, self._clock, WIDTH if kind is PlantedTrees else 1)
        self._engine.rewind(0)
        vocabulary = self._engine.vocabulary_size
        planted = kind(head, self._script, agreements, vocabulary, seed=seed)
        speculator = Speculator(self._engine, planted)
        speculator.begin(speculator.measure(), {})
        if length:
            draft_always(speculator.controllers["greedy"], length)
        return speculator


def timed_table(tokens: int, rounds: int) -> str:
    """Speeds relative to baseline decoding of chains and trees, and of chains of the best constant length."""
    rows = []
    with load("tiny", device="cpu", draft=None, context=max(256, 2 * tokens), threads=1) as model:
        for name, costs in H100.items():
            timing = Timing(model, costs, tokens, rounds)
            base = median(timing.rates(None, ()))
            for label, agreements in AGREEMENTS.items():
                constant = {n: median(timing.rates(PlantedHead, agreements, n)) / base for n in LENGTHS}
                best = max(constant, key=constant.__getitem__)
                for kind in (PlantedHead, PlantedTrees):
                    rates = timing.rates(kind, agreements)
                    drafts = "trees" if kind is PlantedTrees else "chains"
                    cells = [f"{best_decile(rates) / base:.2f}x", f"{median(rates) / base:.2f}x"]
                    cells += [f"{min(rates) / base:.2f}x", f"{max(1.0, constant[best]):.2f}x ({best})"]
                    rows.append([name, f"{label}, {drafts}", *cells])
    head = ["costs", "drafts", "best decile", "median", "worst", "median of chains of the best length"]
    return markdown(head, rows, left=(0, 1))
