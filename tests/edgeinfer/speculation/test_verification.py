"""Which draft tokens are accepted, and that the output distribution is that of the model."""

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from edgeinfer.sampling import Sampler, SamplingParams
from edgeinfer.sampling.sampler import Distribution
from edgeinfer.speculation.drafter import Draft
from edgeinfer.speculation.verification import verify

SIZE = 6
TARGET = np.log(np.array([0.4, 0.25, 0.15, 0.1, 0.07, 0.03])).astype(np.float32)
DRAFTED_FROM = {
    "alike": np.array([0.38, 0.27, 0.15, 0.1, 0.07, 0.03]),
    "far": np.array([0.02, 0.03, 0.05, 0.1, 0.3, 0.5]),
    "without some": np.array([0.0, 0.6, 0.4, 0.0, 0.0, 0.0]),
    "the first ids": np.array([0.7, 0.3, 0.0, 0.0, 0.0, 0.0]),
}
PLAIN: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def rows(count: int) -> npt.NDArray[np.float32]:
    return np.tile(TARGET, (count, 1))


def distribution(probs: npt.NDArray[np.float64]) -> Distribution:
    """The candidates of a drafter: only tokens with a probability above 0."""
    ids = np.flatnonzero(probs)
    return ids, probs[ids]


def chi_square(counts: npt.NDArray[np.int64], probs: npt.NDArray[np.float64]) -> float:
    expected = probs * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("name", DRAFTED_FROM)
def test_sampled_drafts_preserve_the_distribution(name: str) -> None:
    sampler = Sampler(SamplingParams(seed=7, **PLAIN), SIZE)
    random, probs = np.random.default_rng(11), DRAFTED_FROM[name]
    counts, logits = np.zeros(SIZE, np.int64), rows(2)
    for _ in range(20_000):
        draft = int(random.choice(SIZE, p=probs))
        result = verify(Draft((draft,), (distribution(probs),)), logits, [1], sampler, ())
        counts[result[0].id] += 1
    # Five degrees of freedom: 20.5 is exceeded once in a thousand runs.
    assert chi_square(counts, np.exp(TARGET.astype(np.float64))) < 20.5


def test_drafts_of_the_same_distribution_are_always_accepted() -> None:
    sampler = Sampler(SamplingParams(seed=1, **PLAIN), SIZE)
    same = sampler.distribution(TARGET, [])
    for draft in range(SIZE):
        result = verify(Draft((draft, draft), (same, same)), rows(3), [0], sampler, ())
        assert [token.drafted for token in result] == [True, True, False]


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"seed": 5, **PLAIN}, {"seed": 5, "mirostat": 2}])
def test_greedy_drafts_do_not_change_seeded_output(settings: dict[str, Any]) -> None:
    random = np.random.default_rng(3)
    logits = random.standard_normal((200, SIZE)).astype(np.float32) * 2
    plain, with_drafts = (Sampler(SamplingParams(**settings), SIZE) for _ in range(2))
    expected: list[int] = []
    for row in logits:
        expected.append(plain.sample(row, expected))
        plain.accept(expected[-1])
    text: list[int] = []
    while len(text) < len(logits):
        k = min(int(random.integers(0, 4)), len(logits) - len(text) - 1)
        # Some draft tokens are right, up to a point.
        draft = [*expected[len(text) : len(text) + k]]
        if draft and random.random() < 0.6:
            draft[-1] = int(random.integers(SIZE))
        result = verify(Draft(tuple(draft)), logits[len(text) : len(text) + k + 1], text, with_drafts, ())
        text += [token.id for token in result]
    assert text == expected


def test_nothing_follows_the_first_rejected_draft_token() -> None:
    sampler = Sampler(SamplingParams(temperature=0.0), SIZE)
    logits = rows(4)
    logits[:, 2] = 9
    result = verify(Draft((2, 3, 2)), logits, [0], sampler, ())
    assert [(token.id, token.drafted) for token in result] == [(2, True), (2, False)]
    np.testing.assert_array_equal(result[1].logits, logits[1])


def test_nothing_follows_a_draft_token_that_ends_the_completion() -> None:
    sampler = Sampler(SamplingParams(temperature=0.0), SIZE)
    logits = rows(3)
    logits[:, 4] = 9
    result = verify(Draft((4, 4)), logits, [0], sampler, frozenset([4]))
    assert [token.id for token in result] == [4]


def test_penalties_count_preceding_draft_tokens() -> None:
    sampler = Sampler(SamplingParams(temperature=0.0, presence_penalty=5.0), SIZE)
    result = verify(Draft((0, 1, 2)), rows(4), [], sampler, ())
    assert [token.id for token in result] == [0, 1, 2, 3]
