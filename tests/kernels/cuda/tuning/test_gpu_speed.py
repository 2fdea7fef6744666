"""GPU measurements run on the available device: finite results, freed memory."""

from dataclasses import astuple

import pytest
import torch

from edgeinfer_kernels.cuda.tuning import exchange_speed, gpu_speed
from edgeinfer_kernels.cuda.weights.plane_formats import UnsupportedOnDeviceError


def test_bandwidth_matmul_and_copies_are_measured(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_speed, "SYNC_ROUNDS", 5)
    result = gpu_speed.gpu_speed(torch.device(device), read_bytes=1 << 20, copy_bytes=1 << 16, matrix=32)
    assert all(0 < measurement < float("inf") for measurement in astuple(result))
    assert result.sync_seconds < 1
    assert result.meets_in_graph == 1
    assert result.pins_in_place == 1


def test_a_device_that_fails_to_synchronize_is_released(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange_speed, "TIMEOUT_SECONDS", 0.01)
    exchange = exchange_speed.Exchange(torch.device(device))
    exchange.exchange_buffer.begin(answered=0)
    assert not exchange.respond()
    exchange.launch()  # on a GPU this would hang without the release
    assert exchange.respond()
    exchange.arena.close()


def test_a_format_is_measured_on_a_large_and_a_small_head(
    device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    heads = {
        64: gpu_speed.Head(2e-6, 100_000),
        6400: gpu_speed.Head(12e-6, 10_100_000),
    }
    requested = []

    def head(device: torch.device, format_name: str, rows: int) -> gpu_speed.Head:
        requested.append((format_name, rows))
        return heads[rows]

    monkeypatch.setattr(gpu_speed, "timed_head", head)
    monkeypatch.setattr(gpu_speed, "ROUNDS", 1)
    result = gpu_speed.format_speed(
        torch.device(device), "Q4_K", head_bytes=10_000_000, small_rows=64, streaming_bytes=1
    )
    assert requested == [("Q4_K", 64), ("Q4_K", 6400)]
    assert result.bytes_per_second == pytest.approx(1e12)
    assert result.launch_seconds == pytest.approx((2e-6 - 1e-7) / 2)
    assert 0 < result.unpacked_per_second < 1e13


def test_a_head_is_launched_as_a_step_does(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_speed, "ROUNDS", 1)
    result = gpu_speed.timed_head(torch.device(device), "Q8_0", 32)
    assert result.seconds > 0
    assert result.nbytes == 32 * 64 * 8 * 4 + 16 * 64 * 4
    with pytest.raises(UnsupportedOnDeviceError):
        gpu_speed.timed_head(torch.device(device), "F64", 32)
