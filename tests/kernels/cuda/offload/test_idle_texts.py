"""Chats on a described GPU: they share its cache; with one recurrent state, texts are kept in main memory."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import edgeinfer
from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.loading.engine_building import SPILLED_CACHES
from edgeinfer.planning.device_plan import STATE_QUEUE
from edgeinfer_kernels.backend import PAGE
from edgeinfer_kernels.cuda.backend import CudaBackend
from tests.model_zoo import ZOO
from tests.random_models import VOCABULARY


@pytest.mark.slow
@pytest.mark.parametrize(("name", "places", "unit"), [("lfm2", 1, 1), ("llama", 2, PAGE)])
def test_alternating_chats_on_a_gpu_are_not_read_again(
    small_gpu: Callable[[int], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    places: int,
    unit: int,
) -> None:
    path = replace(ZOO[name], formats=("Q8_0",)).write(tmp_path / "model.gguf")
    small_gpu(1 << 40)
    monkeypatch.setattr(CudaBackend, "warm_up", lambda *_: None)
    texts = [np.random.default_rng(seed).integers(3, VOCABULARY, 70).tolist() for seed in range(2)]
    with edgeinfer.load(path, context=128, threads=1, device="cuda", draft=None, parallel=2) as model:
        assert model.parallel == places
        assert (STATE_QUEUE in model.details) == (places == 1)
        assert any("of idle texts are kept in main memory" in line for line in model.details) == (places == 1)
        for turn in range(4):
            text = texts[turn % 2]
            completion = model.generate(text, max_tokens=2, temperature=0.0)
            if turn > 1:
                assert completion.speed.cached_tokens >= (len(text) - 3) // unit * unit
            text += [*completion.ids, 9]


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "kept"), [(0, SPILLED_CACHES), (1, 0)])
def test_no_text_is_kept_for_one_request_at_a_time(
    small_gpu: Callable[[int], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    parallel: int,
    kept: int,
) -> None:
    path = replace(ZOO["lfm2"], formats=("Q8_0",)).write(tmp_path / "lfm2.gguf")
    small_gpu(1 << 40)
    monkeypatch.setattr(CudaBackend, "warm_up", lambda *_: None)
    with edgeinfer.load(path, context=128, threads=1, device="cuda", draft=None, parallel=parallel) as model:
        assert isinstance(model.engine, NativeEngine)
        assert (model.parallel, model.engine.spill.ram) == (1, kept * model.engine.cache.nbytes)
