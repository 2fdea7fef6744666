"""Completions in simulated time with the costs of an H100: heads that pay are used from the first one on, and
useless ones cost little.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import pytest

import edgeinfer
from edgeinfer.model import Model
from harness.drafts import timed_drafts
from harness.drafts.planted_drafts import PlantedHead
from harness.drafts.simulated_drafts import AS_PUBLISHED
from harness.drafts.timed_drafts import H100, GpuCosts, Timing
from tests.model_zoo import ZOO

SEEDS = range(5)
COSTS = [
    pytest.param(H100["qwen3.5-4b"], id="qwen3.5-4b"),
    pytest.param(H100["llama-3.1-8b"], id="llama-3.1-8b", marks=pytest.mark.slow),
]
TOKENS = 128


@pytest.fixture
def model(tmp_path: Path) -> Iterator[Model]:
    """Its size does not matter, as time is simulated."""
    path = replace(ZOO["llama"], context=1024).write(tmp_path / "llama.gguf")
    with edgeinfer.load(path, device="cpu", draft=None, context=1024, threads=1) as model:
        yield model


def speeds(timing: Timing, agreements: tuple[float, ...], length: int = 0) -> list[list[float]]:
    """The speeds of the first completion after loading, of the second, and so on, relative to baseline
    decoding: each with all seeds.
    """
    base = fmean(rate for seed in SEEDS for rate in timing.rates(None, (), seed=seed)[1:])
    runs = [timing.rates(PlantedHead, agreements, length, seed) for seed in SEEDS]
    return [[rate / base for rate in rates] for rates in zip(*runs, strict=True)]


@pytest.mark.slow
@pytest.mark.parametrize("costs", COSTS)
def test_heads_as_published_are_used_from_the_first_completion_on(model: Model, costs: GpuCosts) -> None:
    timing = Timing(model, costs, TOKENS, 2)
    best = max(fmean(speeds(timing, AS_PUBLISHED, length)[1]) for length in (2, 3))
    first, second = speeds(timing, AS_PUBLISHED)
    assert fmean(first) > 0.94 * best
    assert fmean(second) > 0.95 * best
    assert min(first + second) > 1 + 0.3 * (best - 1)


@pytest.mark.slow
@pytest.mark.parametrize(("tokens", "at_least"), [(128, 0.97), (512, 0.985)])
@pytest.mark.parametrize("costs", COSTS)
def test_useless_heads_cost_little(
    model: Model, costs: GpuCosts, tokens: int, at_least: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs = replace(costs, first=0.0)
    timing = Timing(model, costs, tokens, 2)
    assert min(fmean(each) for each in speeds(timing, (0.0,))) > at_least
    monkeypatch.setattr(timed_drafts, "DISTURBED", 0.0)
    assert min(min(each) for each in speeds(timing, (0.0,))) > at_least
