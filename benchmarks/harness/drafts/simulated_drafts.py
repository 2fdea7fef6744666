"""The draft controller in simulated decoding, and what each of its constants gains.

The simulation has texts of several acceptance rates, and costs of drafts and of forwards with several tokens;
one in ten forwards is disturbed. A speed is relative to baseline decoding; "best length" always drafts the
number of tokens that is best for the text. The second table has the speed with one constant neutralized,
relative to the controller's: the geometric mean and the worst case.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from edgeinfer.benchmarking.tables import markdown
from edgeinfer.speculation import draft_controller, draft_costs
from edgeinfer.speculation.draft_controller import DraftController
from edgeinfer.speculation.draft_costs import MAX_DRAFTED, MeasuredCosts

AS_PUBLISHED = (0.80, 0.72, 0.65, 0.60, 0.55)
"""The acceptance of the draft tokens of published heads, each given the previous ones."""
ACCEPTANCES: dict[str, Callable[[int, int], float]] = {
    "0.0": lambda *_: 0.0,
    "0.4": lambda *_: 0.4,
    "0.6": lambda *_: 0.6,
    "0.8": lambda *_: 0.8,
    "0.95": lambda *_: 0.95,
    "as published heads": lambda _, level: AS_PUBLISHED[min(level, len(AS_PUBLISHED) - 1)],
    "0.9, then 0": lambda token, _: 0.9 if token < 200 else 0.0,
    "0, then 0.9": lambda token, _: 0.0 if token < 200 else 0.9,
    "0.9 and 0.2 in turn": lambda token, _: 0.9 if token // 60 % 2 else 0.2,
    "0.7, host loaded by turns": lambda *_: 0.7,
}
"""By the number of the token, and its level in the draft."""
LOADED, LOADED_FACTOR = "0.7, host loaded by turns", 2.0
DRAFT_COSTS = ((0.0, 0.02), (0.0, 0.15), (0.0, 0.4), (0.3, 0.08))
"""Of a draft, independent of its length, and of each of its tokens; the last as of a small model's draft head
on a CPU."""
ROW_COSTS = (0.03, 0.08, 0.3)
DISTURBANCE = (0.1, 2.5)
"""How often a forward is disturbed, and how many times as long it then takes."""
NEUTRAL: dict[str, tuple[Any, str, float]] = {
    "deficit: little": (draft_controller, "MAX_DEFICIT", 0.5),
    "credit: as for probes": (draft_controller, "MAX_CREDIT", 1.0),
    "a draft may risk all": (draft_controller, "STAKE", math.inf),
    "first drafts as short as may be": (draft_controller, "KEPT_GAIN", -1e9),
    "prior: two tokens": (draft_controller, "PRIOR_WEIGHT", 2.0),
    "memory of the acceptance 0.8": (draft_controller, "MEMORY", 0.8),
    "memory of the acceptance 0.99": (draft_controller, "MEMORY", 0.99),
    "disturbed observations count fully": (draft_costs, "MAX_FACTOR", math.inf),
    "baseline is timed once": (draft_costs, "BASELINE_EVERY", 1 << 30),
    "baseline from one forward": (draft_costs, "BASELINE_RUN", 2),
    "probe share 0.1 %": (draft_controller, "PROBE_SHARE", 0.001),
    "probe share 5 %": (draft_controller, "PROBE_SHARE", 0.05),
}


@dataclass(frozen=True)
class Case:
    """A text, and the costs of a draft, of each of its tokens, and of each further token of a forward, in
    forwards.
    """

    acceptance: str
    draft: tuple[float, float]
    row: float

    def costs(self, length: int, token: int = 0) -> tuple[float, float]:
        """Seconds of a draft and of the forward after it."""
        factor = LOADED_FACTOR if self.acceptance == LOADED and token // 150 % 2 else 1.0
        fixed, each = self.draft
        draft = fixed + each * length if length else 0.0
        return factor * draft, factor * (1 + self.row * length)


CASES = [Case(*each) for each in itertools.product(ACCEPTANCES, DRAFT_COSTS, ROW_COSTS)]


def decode(case: Case, length_of: Callable[[], int], record: Any, tokens: int, seed: int) -> float:
    """Speed of a simulated completion, relative to baseline decoding."""
    rng, made, seconds, baseline = random.Random(seed), 0, 0.0, 0.0
    at = ACCEPTANCES[case.acceptance]
    share, factor = DISTURBANCE
    while made < tokens:
        length = length_of()
        draft, forward = case.costs(length, made)
        measured = forward * (factor if rng.random() < share else 1.0)
        accepted = next((n for n in range(length) if rng.random() >= at(made + n, n)), length)
        record(length, accepted, draft, measured)
        seconds += draft + forward
        baseline += sum(case.costs(0, made + n)[1] for n in range(accepted + 1))
        made += accepted + 1
    return baseline / seconds


def controlled(case: Case, tokens: int, seed: int) -> float:
    """The speed with the controller, which knows the measured costs at first."""
    controller = DraftController()
    rows = {count: case.costs(count - 1)[1] for count in range(1, 9)}
    fixed, each = case.draft
    controller.costs.begin(MeasuredCosts(rows, each, fixed))

    def length_of() -> int:
        if controller.cooldown_tokens:
            controller.cooldown_tokens -= 1
            return 0
        return controller.length(MAX_DRAFTED)

    def record(length: int, accepted: int, draft: float, forward: float) -> None:
        if not length:
            controller.record_baseline(forward)
            return
        controller.record_step(accepted + 1, 1 + length, length, draft, forward)
        controller.record_accepted(length, accepted)

    return decode(case, length_of, record, tokens, seed)


def best_length(case: Case, tokens: int, seed: int) -> float:
    """The speed of the best constant length."""
    lengths = (0, 1, 2, 3, 5, 7)
    return max(decode(case, lambda n=n: n, lambda *_: None, tokens, seed) for n in lengths)  # type: ignore[misc]


@contextmanager
def changed(module: Any, name: str, value: float) -> Iterator[None]:
    """Another value of a constant, in every module that has it."""
    holders = [each for each in (draft_controller, draft_costs) if hasattr(each, name)]
    before = [getattr(each, name) for each in holders]
    for each in holders:
        setattr(each, name, value)
    try:
        yield
    finally:
        for each, old in zip(holders, before, strict=True):
            setattr(each, name, old)


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def speeds(tokens: int, seeds: int) -> dict[Case, float]:
    """The controller's speed in every case, over several seeds."""
    return {case: geometric_mean([controlled(case, tokens, seed) for seed in range(seeds)]) for case in CASES}


def tables(tokens: int, seeds: int) -> list[tuple[str, str]]:
    """Heads and tables: the controller by acceptance rate, and without each of its constants."""
    ours = speeds(tokens, seeds)
    rows = []
    for text in ACCEPTANCES:
        cases = [case for case in CASES if case.acceptance == text]
        controlled_speeds = [ours[case] for case in cases]
        best = [geometric_mean([best_length(case, tokens, seed) for seed in range(seeds)]) for case in cases]
        means = geometric_mean(controlled_speeds), min(controlled_speeds), geometric_mean(best)
        rows.append([text, *(f"{value:.3f}" for value in means)])
    by_acceptance = markdown(["acceptance", "controller", "worst", "best length"], rows, left=(0,))
    rows = []
    for label, change in NEUTRAL.items():
        with changed(*change):
            other = speeds(tokens, seeds)
        ratios = [other[case] / ours[case] for case in CASES]
        rows.append([label, f"{geometric_mean(ratios):.3f}", f"{min(ratios):.3f}", f"{max(ratios):.3f}"])
    by_constant = markdown(["without", "mean", "worst", "best"], rows, left=(0,))
    return [("simulated: the draft controller", by_acceptance), ("simulated: its constants", by_constant)]
