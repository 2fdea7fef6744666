"""Loading a draft model with a target on a described GPU: its device, and the steps captured for it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import edgeinfer
from edgeinfer.speculation.draft_costs import MeasuredCosts
from edgeinfer.speculation.speculator import Speculator
from edgeinfer_kernels.cuda.backend import CudaBackend
from edgeinfer_kernels.cuda.cache.layout import TEXT
from edgeinfer_kernels.sizes.cuda_buffers import ALL_STEP_SIZES, COMMON_STEP_SIZES
from edgeinfer_offload.planner import placement_problem
from edgeinfer_offload.runtime.split_backend import SplitBackend
from tests.edgeinfer.speculation.test_drafting import draft_always
from tests.kernels.cuda.offload.conftest import MIB, gpu_bytes, model_file
from tests.model_zoo import ZOO


@pytest.mark.parametrize(("draft", "widths"), [(None, COMMON_STEP_SIZES), ("lookup", ALL_STEP_SIZES)])
def test_steps_of_every_token_count_are_captured_for_drafts(
    small_gpu: Callable[[int], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    draft: str | None,
    widths: tuple[int, ...],
) -> None:
    small_gpu(1 << 40)
    requested: list[Any] = []

    def reported(done: int, total: int) -> None:
        pass

    monkeypatch.setattr(CudaBackend, "warm_up", lambda _, *given: requested.append(given))
    monkeypatch.setattr(Speculator, "measure", lambda self: MeasuredCosts({1: 1.0}))
    settings: dict[str, Any] = {"build_progress": reported, "draft": draft}
    edgeinfer.load(model_file(tmp_path), context=64, device="cuda", **settings).close()
    assert requested == [(widths, reported, (TEXT,))]


@pytest.mark.slow
def test_a_draft_is_on_the_gpu_if_its_target_is_there_entirely(
    small_gpu: Callable[[int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # One layer with a quantized format, which takes a third of the time where kernels are interpreted.
    path = replace(ZOO["llama"], layers=1, formats=("Q8_0",)).write(tmp_path / "llama.gguf")
    small_gpu(1 << 40)
    # Measuring takes minutes where kernels are interpreted.
    monkeypatch.setattr(Speculator, "measure", lambda self: MeasuredCosts({1: 1.0}))
    loading: dict[str, Any] = {"context": 64, "threads": 1, "device": "cuda"}
    ids = [5, 9, 30, 7, 11, 5, 9]
    with edgeinfer.load(path, draft=None, **loading) as plain:
        expected = plain.generate(ids, max_tokens=6, temperature=0.0).ids
        sampled = plain.generate(ids, max_tokens=6, temperature=0.8, seed=3).ids
    with edgeinfer.load(path, draft=str(path), **loading) as model:
        speculator: Any = model.speculator
        assert isinstance(speculator.drafter.engine.backend, CudaBackend)
        draft_always(speculator.controllers["greedy"], 3)
        actual = model.generate(ids, max_tokens=6, temperature=0.0)
        assert actual.ids == expected
        assert actual.speed.accepted_share == 1.0  # it is the model itself
        assert actual.speed.tokens_per_forward == pytest.approx(2.5)
        # The device samples the tokens after a draft, with the uniforms of the host.
        controller = speculator.controllers["seeded"]
        lengths = iter((0, 2, 0, 0, 0))
        controller.length = lambda limit: min(limit, next(lengths))
        controller.longest = lambda length, limit: length
        controller.min_probs = lambda length: (0.0, 0.0)
        assert model.generate(ids, max_tokens=6, temperature=0.8, seed=3).ids == sampled
        completions = model.generate(ids, n=2, max_tokens=3, temperature=0.0)
        assert [completion.ids for completion in completions] == [expected[:3]] * 2


def test_a_draft_that_does_not_fit_the_gpu_is_in_main_memory(
    small_gpu: Callable[[int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = model_file(tmp_path)
    small_gpu(1 << 40)
    monkeypatch.setattr(Speculator, "measure", lambda self: MeasuredCosts({1: 1.0}))
    whole = gpu_bytes(path)
    with edgeinfer.load(
        path, draft=str(path), context=64, threads=1, device="cuda", vram=whole + MIB // 4
    ) as model:
        engine: Any = model.engine
        assert isinstance(engine.backend, CudaBackend)
        speculator: Any = model.speculator
        assert speculator.drafter.engine.backend.name == "cpu"


@pytest.mark.slow
@pytest.mark.parametrize("draft_device", ["gpu", "cpu"])
def test_a_draft_of_a_split_model_is_on_the_planned_device(
    small_gpu: Callable[[int], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draft_device: str
) -> None:
    path = replace(ZOO["llama"], layers=8, formats=("Q8_0",)).write(tmp_path / "llama.gguf")
    small = replace(ZOO["llama"], layers=1, formats=("Q8_0",)).write(tmp_path / "small.gguf")
    small_gpu(1 << 40)
    monkeypatch.setattr(Speculator, "measure", lambda self: MeasuredCosts({1: 1.0}))
    monkeypatch.setattr(placement_problem, "DRAFT_WEIGHT", 100.0 if draft_device == "gpu" else 0.0)
    whole = gpu_bytes(path)
    small_gpu(whole - 1)
    loading: dict[str, Any] = {"context": 64, "threads": 1, "device": "cuda"}
    with edgeinfer.load(path, draft=str(small), **loading) as model:
        engine: Any = model.engine
        assert isinstance(engine.backend, SplitBackend), model.warnings
        assert model.plan is not None
        assert model.plan.draft == draft_device
        assert model.plan.bytes_on("gpu") < whole
        drafts = [item for item in model.plan.items if item.item == "draft model"]
        assert [item.device for item in drafts] == [draft_device]
        speculator: Any = model.speculator
        backend = speculator.drafter.engine.backend
        if draft_device == "cpu":
            assert backend.name == "cpu"
            return
        assert isinstance(backend, CudaBackend)
        assert backend.nbytes <= drafts[0].bytes
        assert " and the draft model; " in model.details[0]
        draft_always(speculator.controllers["greedy"], 2)
        drafted = model.generate([5, 9], max_tokens=3, temperature=0.0)
        assert drafted.speed.accepted_share is not None
        model.speculator = None
        assert model.generate([5, 9], max_tokens=3, temperature=0.0).ids == drafted.ids
