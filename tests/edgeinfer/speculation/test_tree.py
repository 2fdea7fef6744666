"""Draft trees: one forward evaluates the tree; the completion equals baseline decoding."""

import random
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer import Model
from edgeinfer.errors import SettingError
from edgeinfer.sampling import Sampler, SamplingParams
from edgeinfer.speculation.draft_costs import DraftCosts, MeasuredCosts
from edgeinfer.speculation.draft_model import DraftModel
from edgeinfer.speculation.drafter import Draft, Drafter, DraftRequest
from edgeinfer.speculation.speculator import Speculator
from edgeinfer.speculation.trees.tree_pass import TreePass
from edgeinfer.speculation.trees.tree_shape import TreePlanner, TreeShape, best_shape, node_probs
from edgeinfer.speculation.verification import accepted_path, verify
from tests.edgeinfer.fake_engine import FakeEngine, seeded_logits
from tests.edgeinfer.speculation.test_drafting import DRAFT_MODEL, PROMPT, always_draft

SIZE = 6
BUSHY = (-1, -1, 0, 0, 1, 2, 2, 5, 3, 8)
"""The parents of a tree with branches of branches."""


def always_tree(model: Model, depth: int, nodes: int) -> None:
    """Trees of this shape, whatever their cost."""
    always_draft(model, depth)
    assert model.speculator is not None
    for planner in model.speculator.planners.values():
        setattr(planner, "shape", lambda costs, rate, limit, *_: TreeShape(min(limit, depth), nodes))  # noqa: B010


@pytest.fixture(scope="module")
def plain() -> Iterator[Model]:
    with edgeinfer.load("tiny", device="cpu", threads=1, draft=None, context=256) as model:
        yield model


@pytest.fixture(scope="module")
def growing() -> Iterator[Model]:
    options: dict[str, Any] = {"draft": DRAFT_MODEL, "draft_tree_width": 2}
    with edgeinfer.load("tiny", device="cpu", threads=1, context=256, **options) as model:
        assert model.speculator is not None
        assert isinstance(model.speculator.drafter, DraftModel)
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
    always_tree(growing, 4, 10)
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
    """Drafts a tree with the right tokens on one path, and wrong ones everywhere else."""

    name = "knowing"
    tree_width = 3

    def __init__(self, completion: Sequence[int], parents: Sequence[int], path: Sequence[int]) -> None:
        self._answer = list(completion)
        self._parents, self._path = tuple(parents), list(path)

    def propose(self, history: Sequence[int], request: DraftRequest) -> Draft:
        follows = self._answer[len(history) :]
        if len(follows) <= len(self._path) or request.max_nodes < len(self._parents):
            return Draft()
        ids = [7 + index for index in range(len(self._parents))]
        for node, token in zip(self._path, follows, strict=False):
            ids[node] = token
        return Draft(tuple(ids), None, self._parents)


@pytest.mark.default_cases(1)
@pytest.mark.parametrize("path", [[0, 2, 5, 7], [0, 2, 6], [0, 3, 8, 9], [1, 4]])
def test_an_accepted_path_leaves_the_cache_of_baseline_decoding(plain: Model, path: list[int]) -> None:
    expected = plain.generate(PROMPT, max_tokens=120, temperature=0.0)
    plain.speculator = Speculator(plain.engine, FixedTree([*expected.prompt_ids, *expected.ids], BUSHY, path))
    try:
        always_tree(plain, 4, len(BUSHY))
        plain.engine.rewind(0)
        actual = plain.generate(PROMPT, max_tokens=120, temperature=0.0)
    finally:
        plain.speculator = None
    assert actual.ids == expected.ids
    assert actual.speed.tokens_per_forward == pytest.approx(len(path) + 1, rel=0.15)


@pytest.mark.parametrize("seed", range(6))
def test_the_rows_of_a_tree_are_those_of_its_paths(plain: Model, seed: int) -> None:
    rng, engine = random.Random(seed), plain.engine
    text = [rng.randrange(300) for _ in range(20 + 5 * seed)]
    parents = tuple(rng.randrange(-1, index) for index in range(12))
    ids = tuple(rng.randrange(300) for _ in parents)
    engine.rewind(0)
    engine.append(text)
    tree = TreePass.of(engine, Draft(ids, None, parents))
    assert tree is not None
    rows = tree.read(11)
    node = rng.randrange(12)
    path = [node]
    while parents[path[0]] >= 0:
        path.insert(0, parents[path[0]])
    tree.keep(11, path)
    assert list(engine.ids) == [*text, 11, *(ids[each] for each in path)]
    after = engine.append([5])
    engine.rewind(len(text))
    expected = engine.append_all([11, *(ids[each] for each in path), 5])
    np.testing.assert_array_equal(rows[[0, *(1 + each for each in path)]], expected[:-1])
    np.testing.assert_array_equal(after, expected[-1])


def test_trees_without_memory_are_chains(plain: Model) -> None:
    draft = Draft((5, 6, 7, 8), None, (-1, 0, -1, 0))
    plain.engine.rewind(0)
    assert TreePass.of(plain.engine, draft) is not None
    assert TreePass.of(plain.engine, Draft((5, 6))) is None
    assert TreePass.of(plain.engine, Draft(tuple(range(10, 40)), None, (-1,) * 30)) is None
    plain.engine.append([5] * 250)
    assert TreePass.of(plain.engine, draft) is None
    assert TreePass.of(FakeEngine(seeded_logits), draft) is None
    assert draft.chain == Draft((5, 6))
    assert (draft.depth, Draft((5, 6)).depth) == (2, 2)


def test_each_token_is_sampled_from_the_logits_after_its_path() -> None:
    sampler = Sampler(SamplingParams(temperature=0.0), SIZE)
    draft = Draft((2, 3, 4, 1, 5), None, (-1, 0, -1, 0, 3))
    logits = np.zeros((6, SIZE), np.float32)
    for row, best in enumerate((2, 1, 0, 0, 5, 4)):
        logits[row, best] = 9
    result = verify(draft, logits, [0], sampler, ())
    assert [(token.id, token.drafted) for token in result] == [(2, True), (1, True), (5, True), (4, False)]
    assert accepted_path(draft, result) == [0, 3, 4]
    ended = verify(draft, logits, [0], sampler, frozenset([1]))
    assert [token.id for token in ended] == [2, 1]


def test_a_draft_model_grows_candidates_along_its_most_probable_path(growing: Model) -> None:
    assert growing.speculator is not None
    drafter = growing.speculator.drafter
    ids = growing.tokenizer.encode(PROMPT)
    draft = drafter.propose(ids, DraftRequest(4, SamplingParams(temperature=0.0), max_nodes=9))
    chain = drafter.propose(ids, DraftRequest(4, SamplingParams(temperature=0.0)))
    assert len(draft.ids) == 9
    assert draft.depth == 4
    assert draft.chain.ids == chain.ids
    assert draft.chain.probs == pytest.approx(chain.probs, rel=1e-4)
    joint = list[float]()
    for parent, prob in zip(draft.parents, draft.probs, strict=True):
        joint.append(prob * (joint[parent] if parent >= 0 else 1.0))
    assert joint == sorted(joint, reverse=True)


@pytest.mark.parametrize(
    ("draft", "message"),
    [
        (Draft((5, 6), None, (-1, 1)), "parent 1 of token 1"),
        (Draft((5, 6), None, (-1,)), "1 parents of 2 tokens"),
        (Draft((5, 6, 7, 8, 9), None, (-1, 0, 1, 2, 3)), "a tree of 5 levels, not of 4"),
    ],
)
def test_a_wrong_tree_is_refused_in_one_line(plain: Model, draft: Draft, message: str) -> None:
    class Wrong(FixedTree):
        def propose(self, history: Sequence[int], request: DraftRequest) -> Draft:
            return draft

    plain.speculator = Speculator(plain.engine, Wrong([], (), ()))
    try:
        always_tree(plain, 4, 9)
        with pytest.raises(SettingError, match=message):
            plain.generate(PROMPT, max_tokens=20, temperature=0.0)
    finally:
        plain.speculator = None


def costs(row: float, each: float) -> DraftCosts:
    made = DraftCosts()
    made.begin(MeasuredCosts({rows: 1 + row * (rows - 1) for rows in range(1, 17)}, each))
    made.baseline = 1.0
    return made


def test_the_shape_follows_the_costs_and_the_acceptance() -> None:
    even, falling = [1.0] * 7, [1.0, 0.8, 0.6, 0.4, 0.2, 0.1, 0.0]
    free = best_shape(costs(0.0, 0.01), [0.5, 0.2, 0.1], even)
    assert free.nodes == 15
    assert best_shape(costs(0.4, 0.01), [0.5, 0.2, 0.1], even).nodes <= 3
    shallow = best_shape(costs(0.0, 0.3), [0.5, 0.2, 0.1], even)
    assert shallow.depth < free.depth
    good = best_shape(costs(0.05, 0.01), [0.95, 0.02, 0.01], even)
    assert good == TreeShape(7, 7)
    assert best_shape(costs(0.05, 0.01), [0.95, 0.02, 0.01], falling).depth < 5


def test_the_most_probable_nodes_form_the_tree_with_the_most_tokens() -> None:
    assert node_probs([0.5, 0.25], [1, 1], 10) == [0.5, 0.25, 0.25, 0.125, 0.125, 0.0625]
    assert node_probs([0.5, 0.25], [1, 0.5], 10) == [0.5, 0.25, 0.125, 0.0625, 0.0625, 0.03125]
    assert node_probs([0.5, 0.25], [1], 10) == [0.5, 0.25]
    assert node_probs([0.5, 0.3], [2], 10) == pytest.approx([0.625, 0.375])


def test_how_often_candidates_are_right_is_learned() -> None:
    planner = TreePlanner()
    first = planner.rates(0.6, 3)
    assert first[0] == 0.6
    assert sum(first) < 1
    for index in range(60):
        planner.record(3, 1 if index % 2 else 0)
    assert planner.rates(0.5, 3)[1] == pytest.approx(0.5, abs=0.05)
    assert planner.rates(0.5, 3)[2] < 0.05
