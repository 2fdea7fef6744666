"""Draft trees with siblings: one forward evaluates the tree; the completion equals baseline decoding."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer import Model
from edgeinfer.sampling import Sampler, SamplingParams
from edgeinfer.speculation.draft_model import DraftModel
from edgeinfer.speculation.drafter import Draft, Drafter, DraftRequest
from edgeinfer.speculation.speculator import Speculator
from edgeinfer.speculation.tree_pass import TreePass
from edgeinfer.speculation.verification import accepted_sibling, verify
from tests.edgeinfer.fake_engine import FakeEngine, seeded_logits
from tests.edgeinfer.speculation.test_drafting import PROMPT, always_draft

SIZE = 6


@pytest.fixture(scope="module")
def plain() -> Iterator[Model]:
    with edgeinfer.load("tiny", device="cpu", threads=1, draft=None, context=256) as model:
        yield model


@pytest.fixture(scope="module")
def growing() -> Iterator[Model]:
    with edgeinfer.load("tiny", device="cpu", threads=1, context=256) as model:
        assert model.speculator is not None
        assert isinstance(model.speculator.drafter, DraftModel)
        model.speculator.drafter.siblings = 4
        yield model


@pytest.mark.default_cases(1)
@pytest.mark.parametrize(
    "settings",
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "repeat_penalty": 1.3},
        {"temperature": 1.2, "seed": 3},
        {"temperature": 0.9, "seed": 4, "mirostat": 2},
    ],
)
def test_completions_equal_baseline_decoding(plain: Model, growing: Model, settings: dict[str, Any]) -> None:
    always_draft(growing, 4)
    expected = plain.generate(PROMPT, max_tokens=200, **settings)
    actual = growing.generate(PROMPT, max_tokens=200, **settings)
    assert (actual.ids, actual.text, actual.finish_reason) == (
        expected.ids,
        expected.text,
        expected.finish_reason,
    )
    assert actual.speed.tokens_per_forward is not None
    assert actual.speed.tokens_per_forward > 1.5


class FixedTree(Drafter):
    """Drafts one wrong token in the trunk, and the right one as its sibling."""

    name = "knowing"
    nbytes = 0

    def __init__(self, completion: Sequence[int], index: int) -> None:
        self._answer = list(completion)
        self._place = index

    def propose(self, history: Sequence[int], request: DraftRequest) -> Draft:
        follows = self._answer[len(history) :][:4]
        if len(follows) < 4 or request.max_tokens < 4:
            return Draft()
        ids = list(follows)
        others: list[tuple[int, ...]] = [(7,)] * 4
        ids[self._place], others[self._place] = 9, (11, follows[self._place])
        return Draft(tuple(ids), None, tuple(others))

    def close(self) -> None: ...


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("index", [0, 1, 3])
def test_an_accepted_sibling_leaves_the_cache_of_baseline_decoding(plain: Model, index: int) -> None:
    expected = plain.generate(PROMPT, max_tokens=120, temperature=0.0)
    speculator = Speculator(plain.engine, FixedTree([*expected.prompt_ids, *expected.ids], index))
    plain.speculator = speculator
    try:
        always_draft(plain, 4)
        plain.engine.rewind(0)
        actual = plain.generate(PROMPT, max_tokens=120, temperature=0.0)
    finally:
        plain.speculator = None
    assert actual.ids == expected.ids
    # The trunk up to its wrong token, the sibling instead of it, and the token after that.
    assert actual.speed.tokens_per_forward == pytest.approx(index + 2, rel=0.15)


def test_siblings_without_memory_are_dropped(plain: Model) -> None:
    draft = Draft((5, 6), None, ((7,), (8,)))
    plain.engine.rewind(0)
    assert TreePass.of(plain.engine, draft) is not None
    assert TreePass.of(plain.engine, Draft((5, 6))) is None
    assert TreePass.of(plain.engine, Draft((5,), None, (tuple(range(10, 40)),))) is None
    plain.engine.append([5] * 250)
    assert TreePass.of(plain.engine, draft) is None
    assert TreePass.of(FakeEngine(seeded_logits), draft) is None


def test_the_token_after_a_sibling_is_sampled_from_its_logits() -> None:
    sampler = Sampler(SamplingParams(temperature=0.0), SIZE)
    draft = Draft((2, 3), None, ((4,), (5, 1)))
    logits = np.zeros((6, SIZE), np.float32)
    for row, best in enumerate((2, 1, 0, 0, 0, 4)):
        logits[row, best] = 9
    result = verify(draft, logits, [0], sampler, ())
    assert [(token.id, token.drafted) for token in result] == [(2, True), (1, True), (4, False)]
    assert accepted_sibling(draft, result) == 2
    ended = verify(draft, logits, [0], sampler, frozenset([1]))
    assert [token.id for token in ended] == [2, 1]
    assert accepted_sibling(draft, ended) is None


def test_the_most_probable_alternatives_become_siblings(growing: Model) -> None:
    assert growing.speculator is not None
    drafter = growing.speculator.drafter
    ids = growing.tokenizer.encode(PROMPT)
    draft = drafter.propose(ids, DraftRequest(6, SamplingParams(temperature=0.0)))
    assert len(draft.ids) == len(draft.siblings) == 6
    assert len(draft.sibling_tokens) == 4
    assert all(token != draft.ids[index] for index, token in draft.sibling_tokens)
