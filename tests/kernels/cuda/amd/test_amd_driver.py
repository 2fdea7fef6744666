"""AMD's GPUs are listed where NVIDIA lists none, and take the tiles of GPUs with as much shared memory."""

import ctypes
from typing import Any

import pytest
import torch

from edgeinfer_kernels.cuda import device_parts, driver, hip_driver
from edgeinfer_kernels.cuda.driver import AMD_CAPABILITY, Gpu, list_gpus


class Runtime:
    """AMD's runtime with two GPUs, the second of which fails."""

    def hipInit(self, flags: int) -> int:  # noqa: N802
        return 0

    def hipGetDeviceCount(self, count: Any) -> int:  # noqa: N802
        ctypes.cast(count, ctypes.POINTER(ctypes.c_int)).contents.value = 2
        return 0

    def hipDeviceGetName(self, name: Any, nbytes: int, index: int) -> int:  # noqa: N802
        name.value = b"AMD Radeon RX 7900 XTX"
        return index

    def hipDeviceTotalMem(self, total: Any, index: int) -> int:  # noqa: N802
        ctypes.cast(total, ctypes.POINTER(ctypes.c_size_t)).contents.value = 24 << 30
        return 0


def without_nvidia(monkeypatch: pytest.MonkeyPatch, runtime: Runtime | None) -> None:
    def load(name: str) -> Runtime:
        if runtime is None or "hip" not in name:
            raise OSError(name)
        return runtime

    monkeypatch.setattr(ctypes, "CDLL", load)


def test_gpus_of_amd_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    without_nvidia(monkeypatch, Runtime())
    assert list_gpus() == [Gpu(0, "AMD Radeon RX 7900 XTX", AMD_CAPABILITY, 24 << 30)]
    assert driver.driver_version() == 0


def test_without_drivers_there_are_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    without_nvidia(monkeypatch, None)
    assert list_gpus() == []
    assert hip_driver.amd_gpus() == []


def test_the_tiles_of_amd_are_those_of_equal_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_parts, "HAS_HIP", True)
    assert device_parts.compute_capability(torch.device("cuda", 0)) == AMD_CAPABILITY
    assert device_parts.compute_capability(torch.device("cpu")) == 0
