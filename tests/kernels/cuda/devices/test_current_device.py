"""All work of a backend runs while its device is the current one: kernels, graphs, streams, pinned memory."""

import ast
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from edgeinfer_kernels.backend import BatchPositions
from edgeinfer_kernels.cuda import backend as cuda_backend
from edgeinfer_kernels.cuda import current_device
from edgeinfer_kernels.cuda.tuning import exchange_speed, gpu_speed
from tests.kernels.cuda.conftest import HAS_GPU
from tests.kernels.cuda.decoders import opened, read
from tests.model_zoo import ZOO

FOLDER = Path(cuda_backend.__file__).parent
ON_CURRENT_DEVICE = ("graph", "current_device", "set_device", "device")
"""Functions of torch.cuda that `current_device.py` alone calls."""
DEVICE = torch.device("cpu")


@dataclass
class Record:
    """`now`: the current devices, the innermost last; `launches`: kernel -> the devices at its launches."""

    now: list[torch.device] = field(default_factory=list)
    launches: dict[str, set[torch.device | None]] = field(default_factory=dict)

    @contextmanager
    def current(self, device: torch.device) -> Iterator[None]:
        self.now.append(device)
        try:
            yield
        finally:
            self.now.pop()


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Record:
    if HAS_GPU:
        pytest.skip("kernels aren't interpreted here")
    found = Record()
    for module in (current_device, cuda_backend, gpu_speed, exchange_speed):
        monkeypatch.setattr(module, "current", found.current)
    run = interpreter.InterpretedFunction.run

    def recorded(kernel: Any, *arguments: Any, **keywords: Any) -> Any:
        device = found.now[-1] if found.now else None
        found.launches.setdefault(kernel.fn.__name__, set()).add(device)
        return run(kernel, *arguments, **keywords)

    monkeypatch.setattr(interpreter.InterpretedFunction, "run", recorded)
    return found


def test_every_kernel_of_a_model_is_launched_on_its_device(record: Record, tmp_path: Path) -> None:
    with opened(ZOO["llama"], tmp_path, (0,)) as decoder:
        backend = decoder.backend("cpu")
        ids = decoder.ids(24)
        read(backend, ids, (16, 7, 1))
        backend.sample_next(ids[0], 24)
        backend.sample_next(ids[1], 25, may_run_ahead=False)
        backend.copy_positions(0, 30, 4)
        held = backend.snapshot(8)
        backend.restore(held, 8)
        backend.evict(np.arange(4, 6), 8)
        pages = np.array([[0], [1]])
        batch = backend.embed(ids[:2])
        backend.forward_batch(batch, BatchPositions(np.array([3, 4]), pages))
        backend.logits(batch)
        backend.close()
    assert len(record.launches) >= 12
    assert {name: devices for name, devices in record.launches.items() if devices != {DEVICE}} == {}
    assert record.now == []


def test_measurements_run_on_their_device(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_speed, "ROUNDS", 1)
    gpu_speed.timed_head(DEVICE, "Q8_0", 32)
    exchange_speed.stage_seconds(DEVICE)
    assert record.launches
    assert {name: devices for name, devices in record.launches.items() if devices != {DEVICE}} == {}


def test_a_failure_leaves_the_device_that_was_current(record: Record) -> None:
    with pytest.raises(ValueError, match="x"), current_device.on_device(DEVICE):
        raise ValueError("x")
    assert record.now == []


class FakeCuda:
    """The functions of torch.cuda that select a device; `at`: the index of the current one."""

    def __init__(self) -> None:
        self.at = 0
        self.streams: list[int] = []

    @contextmanager
    def device(self, index: int) -> Iterator[None]:
        before, self.at = self.at, index
        try:
            yield
        finally:
            self.at = before

    def stream(self, device: torch.device) -> int:
        self.streams.append(device.index)
        return int(device.index)

    @contextmanager
    def graph(self, graph: object, pool: object, stream: object, capture_error_mode: str) -> Iterator[None]:
        assert stream == self.at, "captured on a stream of another device"
        assert capture_error_mode == "thread_local"
        yield


def test_each_device_has_its_own_capture_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, graph = FakeCuda(), cast(torch.cuda.CUDAGraph, object())
    for name, function in (("device", fake.device), ("Stream", fake.stream), ("graph", fake.graph)):
        monkeypatch.setattr(torch.cuda, name, function)
    for index in (5, 6, 5):
        device = torch.device("cuda", index)
        with current_device.on_device(device), current_device.capturing(device, graph):
            assert fake.at == index
        assert fake.at == 0
    assert fake.streams == [5, 6]


@pytest.mark.slow
def test_other_modules_leave_the_current_device_alone() -> None:
    """Nor do they name "cuda" without an index, which is whatever device is current."""
    found = []
    for path in sorted(FOLDER.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if not isinstance(node, ast.Call) or path.name == "current_device.py":
                continue
            called = ast.unparse(node.func)
            devices = [ast.unparse(each.value) for each in node.keywords if each.arg == "device"]
            if called.removeprefix("torch.cuda.") in ON_CURRENT_DEVICE and called.startswith("torch.cuda."):
                found.append(f"{path.name}:{node.lineno}: {called}")
            if "'cuda'" in devices or ast.unparse(node) == "torch.device('cuda')":
                found.append(f"{path.name}:{node.lineno}: a device without an index")
    assert found == []


@pytest.mark.gpu
def test_a_model_on_the_last_gpu_equals_that_on_the_first(tmp_path: Path) -> None:
    count = torch.cuda.device_count()
    if count < 2:
        pytest.skip("needs two GPUs")
    with opened(ZOO["llama"], tmp_path, (0, 1)) as decoder:
        ids = decoder.ids(24)
        logits, sampled = [], []
        for index in (0, count - 1):
            backend = decoder.backend(f"cuda:{index}")
            backend.warm_up()
            logits.append(read(backend, ids, (16, 7, 1)))
            sampled.append([backend.sample_next(ids[0], 24), backend.sample_next(ids[1], 25)])
            backend.close()
            assert torch.cuda.current_device() == 0
    assert sampled[0] == sampled[1]
    for at, row in logits[0].items():
        np.testing.assert_allclose(row, logits[1][at], rtol=0, atol=2e-2)
