"""Chats on a described GPU: they share its cache, or have recurrent states; idle texts in main memory."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import edgeinfer
from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.loading.engine_building import SPILLED_CACHES
from edgeinfer.planning.parallel_sequences import AUTOMATIC_SEQUENCES, STATE_QUEUE
from edgeinfer_kernels.backend import PAGE
from edgeinfer_kernels.cuda.backend import CudaBackend
from tests.model_zoo import ZOO
from tests.random_models import VOCABULARY


@pytest.mark.slow
@pytest.mark.parametrize(("name", "parallel", "unit"), [("lfm2", 1, 1), ("lfm2", 2, 1), ("llama", 2, PAGE)])
def test_alternating_chats_on_a_gpu_are_not_read_again(
    small_gpu: Callable[[int], None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    parallel: int,
    unit: int,
) -> None:
    path = replace(ZOO[name], formats=("Q8_0",)).write(tmp_path / "model.gguf")
    small_gpu(1 << 40)
    monkeypatch.setattr(CudaBackend, "warm_up", lambda *_: None)
    texts = [np.random.default_rng(seed).integers(3, VOCABULARY, 70).tolist() for seed in range(2)]
    spill = 1 << 24
    settings: dict[str, Any] = {"threads": 1, "device": "cuda", "draft": None, "spill": spill}
    with edgeinfer.load(path, context=128, parallel=parallel, **settings) as model:
        assert model.parallel == parallel
        assert STATE_QUEUE not in model.details
        assert isinstance(model.engine, NativeEngine)
        assert isinstance(model.engine.backend, CudaBackend)
        assert model.plan is not None
        assert model.engine.backend.nbytes == model.plan.bytes_on("gpu")
        kept = any("of idle texts are kept in main memory" in line for line in model.details)
        assert kept == (name == "lfm2")
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
        states = parallel or AUTOMATIC_SEQUENCES[0]
        assert model.parallel == states
        assert model.engine.spill.ram == kept * states * model.engine.cache.nbytes
