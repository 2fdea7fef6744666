"""Draft heads of models with consecutive layers on two GPUs: they are on the last one."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer import Model
from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.sampling import SamplingParams
from edgeinfer.speculation.draft_costs import MeasuredCosts
from edgeinfer.speculation.drafter import Draft, DraftRequest
from edgeinfer.speculation.heads.device_head import DeviceHead
from edgeinfer.speculation.heads.device_medusa import DeviceMedusa
from edgeinfer.speculation.prompt_lookup import PromptLookup
from edgeinfer.speculation.speculator import Speculator
from edgeinfer_offload.runtime.pipeline_backend import PipelineBackend
from tests.edgeinfer.speculation.heads.eagle.random_eagle import RandomEagle
from tests.edgeinfer.speculation.heads.random_assistant import random_assistant
from tests.edgeinfer.speculation.heads.random_heads import mimo_heads
from tests.edgeinfer.speculation.test_drafting import always_draft
from tests.kernels.cuda.devices.test_pipeline_loading import two_gpus as two_gpus
from tests.kernels.cuda.draft.test_head_loading import GREEDY, IDS, check_sampled_drafts, drafter_of
from tests.kernels.cuda.draft.test_medusa_heads import heads as heads
from tests.model_zoo import ZOO
from tests.random_models import RandomModel

LOADING: dict[str, Any] = {"context": 96, "threads": 1}
LAYERS: dict[str, Any] = {**LOADING, "device": "cuda:0,cuda:1", "split": "layers"}
MODELS = {
    "untied": RandomModel("arcee", layers=14, draft_head=True, formats=("Q8_0",)),
    "tied": RandomModel("llama", layers=14, draft_head=True, tied=True, formats=("Q8_0",)),
    "several heads": replace(mimo_heads(own_outputs=True, layers=8), formats=("F16",)),
}


@pytest.fixture(autouse=True)
def unmeasured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measuring takes minutes where kernels are interpreted."""
    monkeypatch.setattr(Speculator, "measure", lambda self: MeasuredCosts({1: 1.0}))


def drafts_after(model: Model) -> list[Draft]:
    """Drafts after a short text, and after one that is processed as a chunk."""
    drafts = []
    for ids in (IDS, [40, 41, 7] * 8 + IDS):
        model.engine.rewind(0)
        model.engine.append(ids[:-1])
        request = DraftRequest(2, SamplingParams(temperature=0.0))
        drafts.append(drafter_of(model).propose(ids, request))
    return drafts


def check_head(model: Model, path: Path, draft: Any, device: str) -> None:
    """Completions are those without drafts, drafts those of the CPU, and the plan counts the head's bytes."""
    assert model.plan is not None
    planned = {(item.item, item.device): item.bytes for item in model.plan.items}
    assert planned["draft head", device] == drafter_of(model).nbytes
    speculator, model.speculator = model.speculator, None
    expected = model.generate(IDS, **GREEDY).ids
    model.speculator = speculator
    found = drafts_after(model)
    always_draft(model, 2)
    model.engine.rewind(0)
    completion = model.generate(IDS, **GREEDY)
    assert completion.ids == expected
    assert completion.speed.accepted_share is not None
    check_sampled_drafts(model)
    with edgeinfer.load(path, draft=draft, device="cpu", **LOADING) as plain:
        for own, wanted in zip(found, drafts_after(plain), strict=True):
            assert own.ids == wanted.ids
            assert own.probs == pytest.approx(wanted.probs, rel=0.1)


def budgets_of(path: Path, *shares: float) -> list[int]:
    """Budgets of two GPUs that hold a model only together."""
    with edgeinfer.load(path, device="cuda:0", draft=None, **LOADING) as model:
        assert model.plan is not None
        return [int(share * model.plan.bytes_on("gpu")) for share in shares or (0.97, 0.97)]


@pytest.mark.slow
@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(
    "name", ["untied", *(pytest.param(n, marks=pytest.mark.every_case) for n in ("tied", "several heads"))]
)
def test_with_layers_on_each_gpu_the_head_is_on_the_last(tmp_path: Path, name: str) -> None:
    path = MODELS[name].write(tmp_path / "model.gguf")
    budgets = budgets_of(path)
    with edgeinfer.load(path, draft="mtp", vram=budgets, **LAYERS) as model:
        assert isinstance(drafter_of(model), DeviceHead), model.warnings
        assert isinstance(model.engine, NativeEngine)
        assert isinstance(model.engine.backend, PipelineBackend)
        assert model.gpu == 1
        assert model.plan is not None
        shard: Any = model.engine.backend.shards[-1]
        kept = drafter_of(model).nbytes
        assert shard.nbytes <= model.plan.bytes_on("gpu1") <= shard.nbytes + kept
        check_head(model, path, "mtp", "gpu1")


@pytest.mark.slow
@pytest.mark.usefixtures("two_gpus")
def test_with_layers_on_each_gpu_medusa_heads_are_on_the_last(tmp_path: Path, heads: Path) -> None:
    path = RandomModel("llama", layers=8, formats=("F16",)).write(tmp_path / "model.gguf")
    with edgeinfer.load(path, draft=heads, vram=budgets_of(path), **LAYERS) as model:
        assert isinstance(drafter_of(model), DeviceMedusa), model.warnings
        check_head(model, path, heads, "gpu1")


@pytest.mark.slow
@pytest.mark.usefixtures("two_gpus")
def test_next_to_layers_on_two_gpus_and_the_cpu_the_head_is_on_the_last(tmp_path: Path) -> None:
    path = MODELS["untied"].write(tmp_path / "model.gguf")
    with edgeinfer.load(path, draft="mtp", vram=budgets_of(path, 0.42, 0.84), **LAYERS) as model:
        assert model.plan is not None
        assert model.plan.placement == "split"
        assert isinstance(drafter_of(model), DeviceHead), model.warnings
        check_head(model, path, "mtp", "gpu1")


def eagle(folder: Path) -> tuple[Path, Path]:
    target = RandomModel("llama", layers=6, formats=("Q8_0",)).write(folder / "model.gguf")
    return target, RandomEagle(target_layers=(1, 3, 6), format="Q8_0", own_table=True).write(
        folder / "h.gguf"
    )


def assistant(folder: Path) -> tuple[Path, Path]:
    target = replace(ZOO["gemma4"], formats=("F16",)).write(folder / "model.gguf")
    return target, replace(random_assistant(), formats=("F16",)).write(folder / "h.gguf")


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize("files", [eagle, assistant])
def test_a_head_that_reads_layers_of_other_gpus_is_left_out_with_a_line(
    tmp_path: Path, files: Callable[[Path], tuple[Path, Path]]
) -> None:
    path, head = files(tmp_path)
    budgets = budgets_of(path)
    with edgeinfer.load(path, draft=head, vram=budgets, **LAYERS) as model:
        assert isinstance(drafter_of(model), PromptLookup)
        assert any("layers that are on other GPUs: using prompt lookup" in line for line in model.warnings)
