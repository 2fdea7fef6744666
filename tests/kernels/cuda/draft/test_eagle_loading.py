"""Loading a model with an EAGLE-3 head on a described GPU: completions are those without drafts."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer.planning.model_plan import plan_model
from edgeinfer.speculation.heads.device_head import DeviceHead
from tests.edgeinfer.speculation.heads.eagle.random_eagle import RandomEagle
from tests.edgeinfer.speculation.test_tree import always_tree
from tests.kernels.cuda.draft.test_head_loading import (
    GPU,
    GREEDY,
    IDS,
    TEXTS,
    check_drafts_of_each_text,
)
from tests.kernels.cuda.draft.test_head_loading import unmeasured as unmeasured
from tests.kernels.cuda.offload.conftest import small_gpu as small_gpu
from tests.model_zoo import ZOO
from tests.random_models import RandomModel

HEAD = RandomEagle(target_layers=(0, 1, 2), format="Q8_0", own_table=True)
TARGETS = {
    "llama": RandomModel("llama", layers=2, formats=("Q8_0",)),
    "qwen35": replace(ZOO["qwen35-draft-head"], draft_head=False, formats=("Q8_0",)),
}


@pytest.mark.slow
@pytest.mark.usefixtures("unmeasured")
def test_completions_equal_baseline_decoding_and_the_head_follows_the_text(tmp_path: Path) -> None:
    path, head = TARGETS["llama"].write(tmp_path / "model.gguf"), HEAD.write(tmp_path / "head.gguf")
    check_drafts_of_each_text(path, head, DeviceHead, TEXTS[::2])


@pytest.mark.slow
@pytest.mark.usefixtures("unmeasured")
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("llama", {"max_tokens": 6, "temperature": 0.9, "seed": 3}),
        ("qwen35", GREEDY),
        ("qwen35", {**GREEDY, "repeat_penalty": 1.6}),
    ],
)
def test_trees_and_recurrent_targets_change_no_completion(
    tmp_path: Path, name: str, settings: dict[str, Any]
) -> None:
    path, head = TARGETS[name].write(tmp_path / "model.gguf"), HEAD.write(tmp_path / "head.gguf")
    with edgeinfer.load(path, draft=head, draft_tree_width=2, **GPU) as model:
        speculator, model.speculator = model.speculator, None
        expected = model.generate(IDS, **settings).ids
        kept = model.engine.snapshot()
        assert kept is not None
        snapshot = replace(kept, ids=list(kept.ids), arrays=[array.copy() for array in kept.arrays])
        model.speculator = speculator
        always_tree(model, 3, 9)
        model.engine.rewind(0)
        assert model.generate(IDS, **settings).ids == expected
        model.engine.rewind(0)
        model.engine.restore(snapshot, len(IDS))
        assert model.generate(IDS, **settings).ids == expected


def test_the_head_is_planned_on_a_gpu_that_holds_the_model(tmp_path: Path) -> None:
    path, head = TARGETS["llama"].write(tmp_path / "model.gguf"), HEAD.write(tmp_path / "head.gguf")
    planned = plan_model(path, draft=head, device="rtx 4090, 64 GiB", context=256)
    assert planned.plan.draft == "gpu"
    assert ("draft head", "gpu") in {(item.item, item.device) for item in planned.plan.items}
