"""Bytes of host memory arrive on the device in order, whether the memory is pinned or not."""

from collections.abc import Iterator

import pytest
import torch

from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.offload import weight_streamer
from edgeinfer_kernels.cuda.offload.weight_streamer import WeightStreamer
from tests.kernels.cuda.conftest import HAS_GPU

PIECE, COUNT = 4096, 200_000


@pytest.fixture(params=["pinned", "refused"])
def streamer(
    request: pytest.FixtureRequest, device: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[WeightStreamer]:
    if request.param == "refused":
        monkeypatch.setattr(weight_streamer, "pin_in_place", lambda memory, device: False)
    counting = Arena()
    WeightStreamer(counting, PIECE)
    result = WeightStreamer(Arena(torch.device(device), counting.used), PIECE)
    yield result
    result.close()


def memory() -> torch.Tensor:
    return torch.randint(0, 256, (COUNT,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def test_spans_arrive_in_order_and_stay_until_released(streamer: WeightStreamer) -> None:
    here = memory()
    refused = streamer.connect([here])
    streamer.begin()
    assert refused in (0, COUNT)
    assert refused == 0 or HAS_GPU
    sums, requested = [], []
    for first in range(0, COUNT - PIECE, 1777):
        spans = [(first + 900, first + 907), (first, first + 777)]
        there = streamer.send(here, spans)
        assert there.shape == (784,)
        sums.append(there.clone())
        streamer.done()
        requested.append(torch.cat([here[begin:end] for begin, end in spans]))
    for result, expected in zip(sums, requested, strict=True):
        assert torch.equal(result.cpu(), expected)


@pytest.mark.skipif(not HAS_GPU, reason="there is nothing to be pinned for")
def test_a_failed_pinning_is_reported(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    here, register = [memory(), memory()], weight_streamer.pin_in_place
    monkeypatch.setattr(
        weight_streamer, "pin_in_place", lambda each, on: each is here[1] and register(each, on)
    )
    streamer = WeightStreamer(Arena(torch.device(device), 4 * PIECE), PIECE)
    assert streamer.connect(here) == COUNT
    streamer.begin()
    for each in here:
        assert torch.equal(streamer.send(each, [(5, 50)]).cpu(), each[5:50])
        streamer.done()
    streamer.close()
