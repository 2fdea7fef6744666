"""Completions with draft trees on a described GPU equal those without drafts."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer.speculation.draft_costs import MeasuredCosts
from edgeinfer.speculation.speculator import Speculator
from edgeinfer_kernels.cuda.backend import CudaBackend
from tests.edgeinfer.speculation.test_tree import FixedTree, always_tree
from tests.kernels.cuda.offload.conftest import small_gpu as small_gpu
from tests.model_zoo import ZOO
from tests.random_models import RandomModel

GPU: dict[str, Any] = {"context": 96, "threads": 2, "device": "cuda"}
IDS = [5, 9, 30, 7, 11, 5, 9]
PARENTS = (-1, -1, 1, 0, 2)
RIGHT = (1, 2, 4)
"""Nodes of the tree whose tokens follow the text."""
MODELS = {
    "arcee": RandomModel("arcee", layers=1, formats=("Q8_0",)),
    "gemma3": replace(ZOO["gemma3"], formats=("Q8_0",)),
    "deepseek2": replace(ZOO["deepseek2"], formats=("Q8_0",)),
}


@pytest.fixture
def unmeasured(small_gpu: Callable[[int], None], monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPU that everything fits. Measuring takes minutes where kernels are interpreted."""
    small_gpu(1 << 40)
    monkeypatch.setattr(Speculator, "measure", lambda self: MeasuredCosts({1: 1.0}))


@pytest.mark.default_cases(1)
@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"temperature": 0.9, "seed": 3}], ids=str)
@pytest.mark.parametrize("name", MODELS)
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
