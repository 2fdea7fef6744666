"""Loading a model whose layers read results of other layers: whole on a described GPU, or on the CPU."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

import edgeinfer
from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.planning.gpu_selection import GpuUnavailableError
from edgeinfer_kernels.cpu.backend import CpuBackend
from edgeinfer_kernels.cuda.backend import CudaBackend
from tests.kernels.cuda.offload.conftest import gpu_bytes
from tests.model_zoo import SMALL_GEMMA3N

IDS = [5, 9, 30, 7, 11, 60, 2, 8, 41]


@pytest.mark.slow
def test_gemma_3n_has_the_planned_bytes_and_rewinds_on_a_gpu(
    small_gpu: Callable[[int], None], tmp_path: Path
) -> None:
    path = SMALL_GEMMA3N.write(tmp_path / "model.gguf")
    small_gpu(1 << 40)
    with (
        edgeinfer.load(path, context=64, threads=1, draft=None) as model,
        edgeinfer.load(path, context=64, threads=1, draft=None, device="cpu") as reference,
    ):
        engine, expected = model.engine, reference.engine
        assert isinstance(engine, NativeEngine)
        assert isinstance(expected, NativeEngine)
        assert isinstance(engine.backend, CudaBackend)
        assert model.plan is not None
        assert engine.backend.nbytes == model.plan.bytes_on("gpu")
        rows = engine.append_all(IDS)
        np.testing.assert_allclose(rows, expected.append_all(IDS), atol=2e-2)
        engine.rewind(5)
        np.testing.assert_allclose(engine.append_all(IDS[5:7]), rows[5:7], atol=2e-2)
        assert len(model.generate(IDS, max_tokens=2, temperature=0.0).ids) == 2


@pytest.mark.slow
def test_gemma_3n_is_on_the_cpu_if_the_gpu_does_not_hold_all(
    small_gpu: Callable[[int], None], tmp_path: Path
) -> None:
    path = SMALL_GEMMA3N.write(tmp_path / "model.gguf")
    small_gpu(1 << 40)
    small_gpu(gpu_bytes(path) - 1)
    with edgeinfer.load(path, context=64, threads=1, draft=None) as model:
        assert isinstance(model.engine, NativeEngine)
        assert isinstance(model.engine.backend, CpuBackend)
        assert model.warnings[0].startswith("running on the CPU: ")
    with pytest.raises(GpuUnavailableError):
        edgeinfer.load(path, context=64, threads=1, draft=None, device="cuda")
