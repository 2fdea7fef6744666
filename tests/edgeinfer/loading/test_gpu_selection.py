"""Which GPU is selected, and the error or warning where none is usable."""

import importlib.util

import pytest

import edgeinfer
from edgeinfer.planning import gpu_selection
from edgeinfer.planning.gpu_selection import GpuUnavailableError, usable_gpu
from edgeinfer_kernels.cuda.driver import Gpu

ADA = Gpu(0, "RTX 4060 Laptop", 89, 8 << 30)


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[Gpu]:
    """The GPUs of the driver; a test fills it."""
    shown: list[Gpu] = []
    monkeypatch.setattr(gpu_selection, "list_gpus", lambda: shown)
    return shown


def test_without_a_gpu_auto_uses_the_cpu_and_cuda_is_an_error(gpus: list[Gpu]) -> None:
    assert usable_gpu("auto") is None
    with pytest.raises(GpuUnavailableError, match=r"saw 'cuda', but no NVIDIA driver shows a GPU here"):
        edgeinfer.load("tiny", device="cuda")


def test_a_missing_device_index_is_named(gpus: list[Gpu]) -> None:
    gpus.append(ADA)
    with pytest.raises(GpuUnavailableError, match=r"saw 'cuda:3', wanted cuda:0 to cuda:0 \(1 here\)"):
        usable_gpu("cuda:3")


def test_a_gpu_that_is_too_old_is_named(gpus: list[Gpu]) -> None:
    gpus.append(Gpu(0, "GTX 1080", 61, 8 << 30))
    with pytest.raises(GpuUnavailableError, match=r"GTX 1080 has compute capability 6\.1, wanted 7\.5"):
        usable_gpu("cuda")


def test_a_missing_extra_is_named_and_auto_uses_the_cpu(
    gpus: list[Gpu], monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus.append(ADA)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(GpuUnavailableError, match=r"needs torch and triton: pip install"):
        usable_gpu("cuda")
    with edgeinfer.load("tiny", threads=1) as model:
        assert any("running on the CPU: RTX 4060 Laptop needs torch" in warning for warning in model.warnings)
