"""Chi-square: speculative sampling has the distribution of baseline sampling, for all samplers."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from edgeinfer.sampling import Sampler, SamplingParams
from edgeinfer.sampling.sampler import Distribution
from edgeinfer.speculation.drafter import Draft
from edgeinfer.speculation.verification import verify

pytestmark = pytest.mark.slow

SIZE = 5
DRAFTED = 2
SAMPLES = 34_000
"""Of three tokens: 10^5 tokens."""
OFF: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
HISTORY = [0, 1, 3, 0, 1]
COMBINATIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "warm and cut": {"temperature": 1.3, "top_k": 4, "top_p": 0.9},
    "min-p and typical": {"min_p": 0.12, "typical_p": 0.9},
    "penalties": {"repeat_penalty": 1.5, "presence_penalty": 0.4, "frequency_penalty": 0.3},
    "penalties and cut": {"repeat_penalty": 1.4, "repeat_last_n": 3, "top_k": 3},
    "DRY": {"dry_multiplier": 0.9, "dry_allowed_length": 1, "dry_sequence_breakers": ()},
    "XTC": {"xtc_probability": 0.5, "xtc_threshold": 0.15},
    "a bias and a ban": {"logit_bias": {2: 1.5, 4: -np.inf}},
    "all together": {
        "temperature": 0.8, "repeat_penalty": 1.2, "dry_multiplier": 0.5, "dry_allowed_length": 1,
        "dry_sequence_breakers": (), "top_k": 4, "xtc_probability": 0.3, "xtc_threshold": 0.2,
    },
}  # fmt: skip


def table(seed: int) -> npt.NDArray[np.float32]:
    """Logits of a chain: row i follows token i."""
    return (1.2 * np.random.default_rng(seed).standard_normal((SIZE, SIZE))).astype(np.float32)


TARGET, DRAFT = table(1), table(2)


class FixedModel:
    """Distributions by history, each computed once."""

    def __init__(self, logits: npt.NDArray[np.float32], settings: SamplingParams) -> None:
        self.settings = settings
        self._logits = logits
        self._sampler = Sampler(settings, SIZE)
        self._found: dict[tuple[int, ...], Distribution] = {}

    def distribution(self, output: Sequence[int]) -> Distribution:
        key = tuple(output)
        if key not in self._found:
            self._found[key] = self._sampler.distribution(self._logits[key[-1]], key)
        return self._found[key]


class FixedEngine(Sampler):
    """A sampler that looks up its distributions, so that many samples take seconds."""

    def __init__(self, known: FixedModel, seed: int) -> None:
        super().__init__(SamplingParams(**{**OFF, "seed": seed}), SIZE)
        self._known = known

    def distribution(self, logits: npt.NDArray[np.float32], history: Sequence[int]) -> Distribution:
        self._last = self._known.distribution(history)
        return self._last


def expected_probs(known: FixedModel) -> dict[tuple[int, ...], float]:
    """Of the three tokens after HISTORY, by the product of their probabilities."""
    result: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(DRAFTED + 1):
        result = {
            (*output, int(token)): prob * float(own)
            for output, prob in result.items()
            for token, own in zip(*known.distribution([*HISTORY, *output]), strict=True)
        }
    return result


def sample_three(
    target: FixedModel, draft: FixedModel, sampler: FixedEngine, draft_engine: FixedEngine
) -> tuple[int, ...]:
    """Three tokens: forwards with drafts of two sampled tokens until there are three."""
    output = list(HISTORY)
    while len(output) < len(HISTORY) + DRAFTED + 1:
        drafted, distributions, ahead = list[int](), list[Distribution](), list(output)
        for _ in range(DRAFTED):
            distributions.append(draft.distribution(ahead))
            ids, probs = distributions[-1]
            drafted.append(int(ids[draft_engine.sample_index(probs)]))
            ahead.append(drafted[-1])
        logits = TARGET[ahead[-DRAFTED - 1 :]]
        result = verify(Draft(tuple(drafted), tuple(distributions)), logits, output, sampler, ())
        output += [token.id for token in result]
    return tuple(output[len(HISTORY) : len(HISTORY) + DRAFTED + 1])


TREE = Draft((1, 3, 0, 2, 4, 1), None, (-1, -1, 0, 0, 1, 3))
"""A tree of two levels and a bit, whose tokens don't depend on the text."""


def three_by_tree(sampler: FixedEngine) -> tuple[int, ...]:
    """Three tokens: forwards with a tree."""
    output = list(HISTORY)
    while len(output) < len(HISTORY) + DRAFTED + 1:
        logits = TARGET[[output[-1], *TREE.ids]]
        output += [token.id for token in verify(TREE, logits, output, sampler, ())]
    return tuple(output[len(HISTORY) : len(HISTORY) + DRAFTED + 1])


def chi_square_limit(degrees: int) -> float:
    """The chi-square limit that is exceeded once in 2000 runs. Source: Wilson and Hilferty 1931."""
    normal = 3.29
    share = 2 / (9 * degrees)
    return float(degrees * (1 - share + normal * share**0.5) ** 3)


def chi_square(
    counts: dict[tuple[int, ...], int], expected: dict[tuple[int, ...], float]
) -> tuple[float, int]:
    """Chi-square and its degrees of freedom; outcomes with fewer than five expected samples are pooled."""
    rare = [output for output, prob in expected.items() if prob * SAMPLES < 5]
    pairs = [
        (counts.get(output, 0), prob * SAMPLES) for output, prob in expected.items() if output not in rare
    ]
    if rare:
        pairs.append((sum(counts.get(s, 0) for s in rare), sum(expected[s] for s in rare) * SAMPLES))
    return sum((seen - reference) ** 2 / reference for seen, reference in pairs), len(pairs) - 1


def counted(target: FixedModel, draft: FixedModel) -> dict[tuple[int, ...], int]:
    sampler, draft_engine = FixedEngine(target, 7), FixedEngine(draft, 8)
    counts: dict[tuple[int, ...], int] = {}
    for _ in range(SAMPLES):
        output = sample_three(target, draft, sampler, draft_engine)
        counts[output] = counts.get(output, 0) + 1
    return counts


@pytest.mark.parametrize(
    "name",
    [name if name == "all together" else pytest.param(name, marks=pytest.mark.slow) for name in COMBINATIONS],
)
def test_three_tokens_in_a_row_are_distributed_as_without_drafts(name: str) -> None:
    settings = SamplingParams(**{**OFF, **COMBINATIONS[name]})
    target, draft = FixedModel(TARGET, settings), FixedModel(DRAFT, settings)
    expected, counts = expected_probs(target), counted(target, draft)
    assert set(counts) <= set(expected)
    result, degrees = chi_square(counts, expected)
    assert result < chi_square_limit(degrees)


@pytest.mark.parametrize("name", ["penalties and cut", "all together"])
def test_tokens_of_trees_are_distributed_as_without_drafts(name: str) -> None:
    target = FixedModel(TARGET, SamplingParams(**{**OFF, **COMBINATIONS[name]}))
    expected, sampler, counts = expected_probs(target), FixedEngine(target, 7), dict[tuple[int, ...], int]()
    for _ in range(SAMPLES):
        output = three_by_tree(sampler)
        counts[output] = counts.get(output, 0) + 1
    assert set(counts) <= set(expected)
    result, degrees = chi_square(counts, expected)
    assert result < chi_square_limit(degrees)


def test_the_test_detects_a_rule_that_accepts_every_draft() -> None:
    settings = SamplingParams(**OFF)
    result, degrees = chi_square(
        counted(FixedModel(DRAFT, settings), FixedModel(DRAFT, settings)),
        expected_probs(FixedModel(TARGET, settings)),
    )
    assert result > 10 * chi_square_limit(degrees)
