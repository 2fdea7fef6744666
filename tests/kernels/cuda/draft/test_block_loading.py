"""Loading a model with a block drafter on a described GPU: completions are those without drafts."""

from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer.sampling import SamplingParams
from edgeinfer.speculation.drafter import DraftRequest
from edgeinfer.speculation.heads.device_block_drafter import DeviceBlockDrafter
from edgeinfer.speculation.prompt_lookup import PromptLookup
from tests.edgeinfer.speculation.heads.dflash.random_dflash import RandomDFlash
from tests.edgeinfer.speculation.test_drafting import always_draft
from tests.edgeinfer.speculation.test_tree import always_tree
from tests.kernels.cuda.draft.test_head_loading import (
    GPU,
    GREEDY,
    IDS,
    check_drafts_of_each_text,
    drafter_of,
)
from tests.kernels.cuda.draft.test_head_loading import unmeasured as unmeasured
from tests.kernels.cuda.offload.conftest import small_gpu as small_gpu
from tests.random_models import RandomModel

TARGET = RandomModel("llama", layers=2, formats=("Q8_0",))
DRAFT = RandomDFlash(layers=1, target_layers=(0, 1, 2), format="Q8_0")


@pytest.mark.slow
@pytest.mark.usefixtures("unmeasured")
def test_completions_equal_baseline_decoding_and_the_drafter_follows_the_text(tmp_path: Path) -> None:
    path, draft = TARGET.write(tmp_path / "model.gguf"), DRAFT.write(tmp_path / "draft.gguf")
    check_drafts_of_each_text(path, draft, DeviceBlockDrafter)


@pytest.mark.usefixtures("unmeasured")
def test_the_drafts_are_those_of_the_cpu(tmp_path: Path) -> None:
    path, draft = TARGET.write(tmp_path / "model.gguf"), DRAFT.write(tmp_path / "draft.gguf")
    drafts = []
    for settings in ({**GPU, "device": "cpu"}, GPU):
        with edgeinfer.load(path, draft=draft, **settings) as model:
            ids = [*IDS, *IDS, 40]
            model.engine.append(ids[:10])
            model.engine.append(ids[10:-1])
            request = DraftRequest(4, SamplingParams(temperature=0.0))
            drafts.append(drafter_of(model).propose(ids, request))
    assert len(drafts[0].ids) == 4
    assert drafts[0].ids == drafts[1].ids
    assert drafts[1].probs == pytest.approx(drafts[0].probs, rel=0.1)


@pytest.mark.slow
@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("settings", [GREEDY, {"max_tokens": 6, "temperature": 0.9, "seed": 3}])
def test_trees_change_no_completion(tmp_path: Path, settings: dict[str, Any]) -> None:
    path, draft = TARGET.write(tmp_path / "model.gguf"), DRAFT.write(tmp_path / "draft.gguf")
    with edgeinfer.load(path, draft=draft, draft_tree_width=2, **GPU) as model:
        speculator, model.speculator = model.speculator, None
        expected = model.generate(IDS, **settings).ids
        model.speculator = speculator
        always_tree(model, 3, 9)
        model.engine.rewind(0)
        assert model.generate(IDS, **settings).ids == expected


@pytest.mark.slow
@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize("kv", ["q8_0", "q4_0", "q4_0+f16"])
def test_other_caches_change_no_completion(tmp_path: Path, kv: str) -> None:
    path, draft = TARGET.write(tmp_path / "model.gguf"), DRAFT.write(tmp_path / "draft.gguf")
    settings = {**GPU, "kv": kv}
    with edgeinfer.load(path, draft=None, **settings) as plain:
        expected = plain.generate(IDS, **GREEDY).ids
    with edgeinfer.load(path, draft=draft, **settings) as model:
        always_draft(model, 4)
        assert model.generate(IDS, **GREEDY).ids == expected


@pytest.mark.usefixtures("unmeasured")
def test_a_markov_head_gives_prompt_lookup_and_one_line(tmp_path: Path) -> None:
    path = TARGET.write(tmp_path / "model.gguf")
    draft = RandomDFlash(layers=1, target_layers=(0, 1), rank=16).write(tmp_path / "draft.gguf")
    with edgeinfer.load(path, draft=draft, **GPU) as model:
        assert isinstance(drafter_of(model), PromptLookup)
        assert (
            sum("a Markov head or a selector) runs on the CPU only" in line for line in model.warnings) == 1
        )
