"""Completions with draft trees on a described GPU equal those without drafts."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer.engine.hidden_states import HiddenStep
from edgeinfer.sampling import SamplingParams
from edgeinfer.speculation.draft_costs import MeasuredCosts
from edgeinfer.speculation.drafter import Draft, Drafter, DraftRequest
from edgeinfer.speculation.heads.device_head import DeviceHead
from edgeinfer.speculation.speculator import Speculator
from edgeinfer_kernels.cuda.backend import CudaBackend
from tests.edgeinfer.speculation.test_tree import FixedTree, always_tree
from tests.kernels.cuda.offload.conftest import small_gpu as small_gpu
from tests.model_zoo import ZOO
from tests.random_models import RandomModel

GPU: dict[str, Any] = {"context": 96, "threads": 1, "device": "cuda"}
GREEDY: dict[str, Any] = {"temperature": 0.0}
IDS = [5, 9, 30, 7, 11, 5, 9]
PARENTS = (-1, -1, 1, 0, 2)
RIGHT = (1, 2, 4)
"""Nodes of the tree whose tokens follow the text."""
MODELS = {
    "arcee": RandomModel("arcee", layers=1, formats=("Q8_0",)),
    "gemma3": replace(ZOO["gemma3"], formats=("Q8_0",)),
    "deepseek2": replace(ZOO["deepseek2"], formats=("Q8_0",)),
    "lfm2": replace(ZOO["lfm2"], formats=("Q8_0",), seed=1),
}
HEADS = {
    "arcee": RandomModel("arcee", layers=1, draft_head=True, formats=("Q8_0",)),
    "glm4moe": replace(ZOO["glm4moe"], formats=("Q8_0",)),
    "qwen35": replace(ZOO["qwen35-draft-head"], formats=("Q8_0",)),
}


class ObservedTrees(FixedTree):
    """Trees with the right tokens on one path, next to a head that observes the text."""

    def __init__(self, head: Drafter, answer: Sequence[int]) -> None:
        super().__init__(answer, PARENTS, RIGHT)
        self._head = head

    @property
    def hidden_layers(self) -> Sequence[int]:
        return self._head.hidden_layers

    def observe(self, step: HiddenStep) -> None:
        self._head.observe(step)


@pytest.fixture
def unmeasured(
    small_gpu: Callable[[int], None], float32_products: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GPU that everything fits. Measuring takes minutes where kernels are interpreted."""
    small_gpu(1 << 40)
    monkeypatch.setattr(Speculator, "measure", lambda self: MeasuredCosts({1: 1.0}))


@pytest.mark.slow
@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    ("name", "settings"), [*((name, GREEDY) for name in MODELS), ("arcee", {"temperature": 0.9, "seed": 3})]
)
def test_completions_equal_baseline_decoding(tmp_path: Path, name: str, settings: dict[str, Any]) -> None:
    path = MODELS[name].write(tmp_path / "model.gguf")
    with edgeinfer.load(path, draft=None, **GPU) as model:
        assert isinstance(getattr(model.engine, "backend", None), CudaBackend)
        expected = model.generate(IDS, max_tokens=9, **settings)
        answer = [*expected.prompt_ids, *expected.ids]
        model.speculator = Speculator(model.engine, FixedTree(answer, PARENTS, RIGHT))
        always_tree(model, 3, len(PARENTS))
        model.engine.rewind(0)
        actual = model.generate(IDS, max_tokens=9, **settings)
        assert actual.ids == expected.ids
        assert actual.speed.tokens_per_forward is not None
        assert actual.speed.tokens_per_forward > 2
        model.speculator = None


def probs_of_paths(tree: Draft) -> dict[tuple[int, ...], float]:
    """The probability of each node by the tokens up to it, whatever their order in the tree."""
    paths = list[tuple[int, ...]]()
    for token, parent in zip(tree.ids, tree.parents, strict=True):
        paths.append((*(paths[parent] if parent >= 0 else ()), token))
    return dict(zip(paths, tree.probs, strict=True))


@pytest.mark.default_cases(1)
@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("name", HEADS)
def test_the_states_of_an_accepted_path_are_those_of_the_text(tmp_path: Path, name: str) -> None:
    """The head drafts the same tree after a text whose paths were accepted as after the text alone."""
    path = HEADS[name].write(tmp_path / "model.gguf")
    with edgeinfer.load(path, draft="mtp", draft_tree_width=2, **GPU) as model:
        assert model.speculator is not None
        engine, head = model.engine, model.speculator.drafter
        assert isinstance(head, DeviceHead)
        model.speculator = None
        expected = model.generate(IDS, max_tokens=9, **GREEDY)
        answer = [*expected.prompt_ids, *expected.ids]
        model.speculator = Speculator(engine, ObservedTrees(head, answer))
        always_tree(model, 3, len(PARENTS))
        engine.rewind(0)
        assert model.generate(IDS, max_tokens=9, **GREEDY).ids == expected.ids
        assert engine.ids == answer[:-1]
        request = DraftRequest(3, SamplingParams(temperature=0.0), max_nodes=7)
        after = head.propose(answer, request)
        engine.rewind(0)
        engine.append(answer[:-1])
        alone = head.propose(answer, request)
        after_probs, alone_probs = probs_of_paths(after), probs_of_paths(alone)
        assert after_probs == pytest.approx(alone_probs, rel=0.2)
        assert len(after.ids) == len(after_probs) == 7
        assert after.chain != after


@pytest.mark.slow
@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    ("name", "settings"), [("qwen35", GREEDY), ("arcee", {"temperature": 0.9, "seed": 3})]
)
def test_the_trees_of_a_head_change_no_completion(
    tmp_path: Path, name: str, settings: dict[str, Any]
) -> None:
    path = HEADS[name].write(tmp_path / "model.gguf")
    with edgeinfer.load(path, draft="mtp", draft_tree_width=2, **GPU) as model:
        speculator, model.speculator = model.speculator, None
        expected = model.generate(IDS, max_tokens=6, **settings)
        model.speculator = speculator
        always_tree(model, 3, 9)
        model.engine.rewind(0)
        actual = model.generate(IDS, max_tokens=6, **settings)
        assert actual.ids == expected.ids
        assert actual.speed.tokens_per_forward is not None
