"""Drafts by the model with layers skipped."""

from pathlib import Path

import numpy as np
import pytest

import edgeinfer
from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.errors import SettingError
from edgeinfer.sampling import SamplingParams
from edgeinfer.speculation.drafter import DraftRequest
from edgeinfer.speculation.layer_skipping import LayerSkipping, kept_layers
from tests.kernels.cpu.test_cpu_backend import cpu, engine_for, exact, relative
from tests.model_zoo import ZOO
from tests.random_models import VOCABULARY

IDS = np.random.default_rng(2).integers(3, VOCABULARY, 40).tolist()


@pytest.mark.parametrize(
    ("count", "layers"),
    [(1, [0]), (2, [0]), (4, [0, 3]), (10, [0, 1, 2, 8, 9]), (32, [*range(10), *range(26, 32)])],
)
def test_the_first_and_last_layers_draft(count: int, layers: list[int]) -> None:
    assert kept_layers(count) == layers


@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen2moe", "deepseek2"])
def test_some_layers_equal_the_reference_and_keep_the_cache(tmp_path: Path, name: str) -> None:
    path = ZOO[name].write(tmp_path / "model.gguf")
    own, truth = engine_for(path, cpu()), engine_for(path, exact)
    expected = own.append_all(IDS)[-1]
    own.rewind(len(IDS) - 1)
    truth.append(IDS[:-1])
    layers = [0, len(own.specification.layers) - 1]
    actual, right = (engine.logits_of_layers(7, len(IDS) - 1, layers) for engine in (own, truth))
    assert relative(actual, right) < 5e-6
    assert own.ids == IDS[:-1]
    assert relative(own.append(IDS[-1:]), expected) < 1e-6
    own.close()


def test_all_layers_draft_the_tokens_of_the_model() -> None:
    with edgeinfer.load("tiny", device="cpu", threads=1, draft=None, context=128) as model:
        assert isinstance(model.engine, NativeEngine)
        drafter = LayerSkipping(model.engine, range(len(model.engine.specification.layers)))
        completion = model.generate("Once upon a time", max_tokens=12, temperature=0.0)
        text = [*completion.prompt_ids, *completion.ids]
        model.engine.rewind(len(text) - 7)
        settings = SamplingParams(temperature=0.0)
        assert drafter.propose(text[:-6], DraftRequest(6, settings)).ids == tuple(text[-6:])
        assert drafter.propose([5, 6, 7], DraftRequest(1, settings)).ids == ()  # not cached


def test_wider_trees_than_a_forward_accepts_are_refused() -> None:
    with pytest.raises(SettingError, match="draft_tree_width: saw 9, wanted a whole number from 0 to 8"):
        edgeinfer.load("tiny", draft_tree_width=9)
