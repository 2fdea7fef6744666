"""Draft heads of models with tensor parallel: a head is whole on one rank. Two processes with gloo and the
interpreter, or two GPUs.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import edgeinfer
from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.speculation.heads.device_head import DeviceHead
from edgeinfer.speculation.heads.device_medusa import DeviceMedusa
from edgeinfer.speculation.prompt_lookup import PromptLookup
from edgeinfer_offload.runtime.tensor_backend import TensorBackend
from tests.edgeinfer.speculation.heads.eagle.random_eagle import RandomEagle
from tests.edgeinfer.speculation.heads.random_heads import mimo_heads
from tests.edgeinfer.speculation.test_short_vocabulary import small_vocabularies
from tests.edgeinfer.speculation.test_tree import always_tree
from tests.kernels.cuda.devices.test_pipeline_heads import check_head
from tests.kernels.cuda.devices.test_pipeline_heads import unmeasured as unmeasured
from tests.kernels.cuda.devices.test_tensor_loading import two_gpus as two_gpus
from tests.kernels.cuda.draft.test_head_loading import GREEDY, IDS, drafter_of
from tests.kernels.cuda.draft.test_medusa_heads import heads as heads
from tests.random_models import RandomModel

TENSOR: dict[str, Any] = {"context": 96, "threads": 1, "device": "cuda:0,cuda:1", "split": "tensor"}
LLAMA = RandomModel("llama", layers=2, formats=("F16",))
MODELS = {
    "untied": replace(LLAMA, draft_head=True),
    "tied": replace(LLAMA, draft_head=True, tied=True),
    "several heads": replace(mimo_heads(own_outputs=True), formats=("F16",)),
}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.device_count() == 1, reason="one GPU: the ranks need one each"),
]


def check_tensor_head(path: Path, draft: Any, drafter: type[Any], **options: Any) -> None:
    """The head is on a rank, whose memory the plan counts; its drafts are those of the CPU."""
    with edgeinfer.load(path, draft=draft, **TENSOR, **options) as model:
        assert isinstance(drafter_of(model), drafter), model.warnings
        assert isinstance(model.engine, NativeEngine)
        assert isinstance(model.engine.backend, TensorBackend)
        assert model.plan is not None
        assert model.gpu is not None
        check_head(model, path, draft, ("gpu", "gpu1")[model.gpu])


@pytest.mark.parametrize(
    "name", ["untied", *(pytest.param(n, marks=pytest.mark.every_case) for n in ("tied", "several heads"))]
)
def test_the_head_of_a_file_is_on_one_rank(tmp_path: Path, name: str) -> None:
    path = MODELS[name].write(tmp_path / "model.gguf")
    check_tensor_head(path, "mtp", DeviceHead, vram=(1 << 30, 1 << 29))


def test_a_tree_is_drafted_on_one_rank_and_verified_by_all(tmp_path: Path) -> None:
    """After the head is closed, its model generates the same."""
    path = MODELS["untied"].write(tmp_path / "model.gguf")
    with edgeinfer.load(path, draft="mtp", draft_tree_width=2, **TENSOR) as model:
        speculator, model.speculator = model.speculator, None
        expected = model.generate(IDS, **GREEDY).ids
        model.speculator = speculator
        always_tree(model, 3, 7)
        model.engine.rewind(0)
        completion = model.generate(IDS, **GREEDY)
        assert completion.ids == expected
        assert completion.speed.accepted_share is not None
        drafter_of(model).close()
        model.speculator = None
        model.engine.rewind(0)
        assert model.generate(IDS, **GREEDY).ids == expected


def test_a_head_on_a_rank_drafts_from_all_of_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small_vocabularies(monkeypatch, 64)
    path = MODELS["untied"].write(tmp_path / "model.gguf")
    with edgeinfer.load(path, draft="mtp", **TENSOR) as model:
        assert isinstance(drafter_of(model), DeviceHead)
        assert drafter_of(model).short_vocabulary == 0


def test_an_eagle_head_reads_states_between_layers(tmp_path: Path) -> None:
    path = LLAMA.write(tmp_path / "model.gguf")
    head = RandomEagle(target_layers=(0, 1, 2), format="F16", own_table=True).write(tmp_path / "head.gguf")
    check_tensor_head(path, head, DeviceHead)


def test_medusa_heads_are_on_one_rank(tmp_path: Path, heads: Path) -> None:
    path = LLAMA.write(tmp_path / "model.gguf")
    check_tensor_head(path, heads, DeviceMedusa)


def test_ranks_without_memory_for_the_head_give_prompt_lookup_and_a_line(tmp_path: Path) -> None:
    path = MODELS["untied"].write(tmp_path / "model.gguf")
    with edgeinfer.load(path, draft=None, **TENSOR) as model:
        assert model.plan is not None
        budgets = tuple(model.plan.bytes_on(name) for name in ("gpu", "gpu1"))
    with edgeinfer.load(path, draft="mtp", vram=budgets, **TENSOR) as model:
        assert isinstance(drafter_of(model), PromptLookup)
        assert any("too little memory for the draft head" in line for line in model.warnings)
