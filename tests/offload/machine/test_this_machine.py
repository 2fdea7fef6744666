"""This machine: free memory, measurements, known cards."""

from pathlib import Path

import psutil
import pytest

from edgeinfer_kernels.cpu.runtime.kernel_speed import KernelSpeed, StepSpeed
from edgeinfer_kernels.cuda.driver import Gpu
from edgeinfer_offload.machine import this_machine
from edgeinfer_offload.machine.measure import stored_figures
from edgeinfer_offload.machine.this_machine import GPU_FIGURES, unmeasured_machine, with_cpu_speeds, with_gpu

GPU = Gpu(0, "NVIDIA GeForce RTX 4060 Laptop GPU", 89, 8 << 30)


def test_free_memory_needs_no_measurement() -> None:
    machine = unmeasured_machine(3)
    assert machine.processor.threads == 3
    assert 0 < machine.processor.free_bytes <= psutil.virtual_memory().total
    assert machine.graphics is None
    assert machine.origin == "unmeasured"


def test_each_format_is_measured_on_first_use_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[str] = []

    def speed(kernels: object, name: str, threads: int, read_bytes: int, block_seconds: float) -> KernelSpeed:
        assert block_seconds == 7e-6
        requested.append(name)
        return KernelSpeed(1e10 * threads, 1e12 if name == "Q4_K" else 5e11)

    monkeypatch.setattr(this_machine, "kernel_speed", speed)
    monkeypatch.setattr(this_machine, "load_kernels", lambda *arguments: None)
    monkeypatch.setattr(this_machine, "step_speed", lambda *arguments: StepSpeed(7e-6, 5e-5))
    monkeypatch.setattr(this_machine, "measured_bandwidth", lambda folder, threads: 3e10)
    machines = [
        with_cpu_speeds(unmeasured_machine(2), tmp_path, formats)
        for formats in (["Q4_K"], ["Q4_K", "Q6_K", "TQ1_0"], ["Q6_K", "Q4_K"])
    ]
    assert requested == ["Q4_K", "Q4_K", "Q6_K", "Q6_K"]
    result = machines[-1].processor
    assert result.bytes_per_second == 3e10
    assert result.operations_per_second == pytest.approx(2 / (1 / 1e12 + 1 / 5e11))
    assert result.kernels == {"Q4_K": 2e10, "Q6_K": 2e10}
    assert (result.block_seconds, result.token_seconds) == (7e-6, 5e-5)
    assert machines[-1].origin == "measured"


def test_cacheable_weights_have_the_measured_cache_bandwidth(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requested: list[int] = []

    def cached(kernels: object, name: str, threads: int, read_bytes: int) -> KernelSpeed:
        requested.append(read_bytes >> 20)
        return KernelSpeed(9e10, 3e11)

    monkeypatch.setattr(this_machine, "kernel_speed", lambda *arguments: KernelSpeed(1e10, 1e12))
    monkeypatch.setattr(this_machine, "cached_speed", cached)
    monkeypatch.setattr(this_machine, "step_speed", lambda *arguments: StepSpeed(7e-6, 5e-5))
    monkeypatch.setattr(this_machine, "load_kernels", lambda *arguments: None)
    monkeypatch.setattr(this_machine, "measured_bandwidth", lambda folder, threads: 3e10)
    result = [
        with_cpu_speeds(unmeasured_machine(2), tmp_path, ["Q4_K"], size << 20).processor
        for size in (1, 20, 15, 255, 256, 4096)
    ]
    assert [processor.kernels["Q4_K"] for processor in result] == [9e10] * 4 + [1e10] * 2
    assert [processor.products["Q4_K"] for processor in result] == [3e11] * 4 + [1e12] * 2
    assert requested == [4, 4, 16, 16, 256, 256]


def test_the_better_of_two_measurements_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks = iter((StepSpeed(4e-4, 5e-5), StepSpeed(7e-6, 9e-5)))
    speeds = iter((KernelSpeed(5e10, 1e11), KernelSpeed(1e10, 3e11)))
    monkeypatch.setattr(this_machine, "kernel_speed", lambda *arguments: next(speeds))
    monkeypatch.setattr(this_machine, "step_speed", lambda *arguments: next(blocks))
    monkeypatch.setattr(this_machine, "load_kernels", lambda *arguments: None)
    monkeypatch.setattr(this_machine, "measured_bandwidth", lambda folder, threads: 3e10)
    result = with_cpu_speeds(unmeasured_machine(2), tmp_path, ["Q4_K"]).processor
    assert (result.block_seconds, result.token_seconds) == (7e-6, 5e-5)
    assert (result.kernels["Q4_K"], result.products["Q4_K"]) == (5e10, 3e11)


def test_a_measured_gpu_has_its_measurements(tmp_path: Path) -> None:
    known = {f"gpu 0 {name}": 1e10 for name in GPU_FIGURES} | {"gpu 0 Q4_K": 9e9, "gpu 0 Q8_0": 5e10}
    known |= {"gpu 0 launch_seconds": 3e-6, "gpu 0 sync_seconds": 2e-5}
    stored_figures(tmp_path).keep(known)
    machine = with_gpu(unmeasured_machine(2), GPU, 7 << 30, tmp_path)
    assert machine.graphics is not None
    assert machine.link is not None
    assert machine.graphics.free_bytes == 7 << 30
    assert machine.origin == "measured"
    assert machine.graphics.operations_per_second == 5e9
    # Noise never makes a kernel faster than memory.
    assert machine.graphics.kernels == {"Q4_K": 9e9, "Q8_0": 1e10}
    assert (machine.graphics.launch_seconds, machine.link.sync_seconds) == (3e-6, 2e-5)


def test_an_unmeasured_gpu_is_looked_up_by_name(tmp_path: Path) -> None:
    machine = with_gpu(unmeasured_machine(2), GPU, 7 << 30, tmp_path)
    assert machine.graphics is not None
    assert machine.graphics.bytes_per_second == pytest.approx(0.9 * 256e9)
    assert (machine.graphics.free_bytes, machine.graphics.context_bytes) == (7 << 30, 0)
    assert machine.origin == "described"
    unknown = with_gpu(unmeasured_machine(2), Gpu(1, "Some GPU", 90, 1 << 30), 1 << 29, tmp_path)
    assert unknown.graphics is not None
    assert unknown.graphics.bytes_per_second == float("inf")
    assert unknown.origin == "unmeasured"
