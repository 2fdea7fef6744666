"""Measures the cost of a CPU stage without work, and whether device and host can synchronize within a
graph.
"""

import time

import torch

from edgeinfer_kernels.cpu.runtime.kernel_args import ANSWERED, SENT
from edgeinfer_kernels.cuda.current_device import capturing, current
from edgeinfer_kernels.cuda.decode.step_launches import StepLaunches
from edgeinfer_kernels.cuda.decode.step_norms import NextNorm
from edgeinfer_kernels.cuda.decode.workspace import Workspace
from edgeinfer_kernels.cuda.device_memory import Arena
from edgeinfer_kernels.cuda.offload.cpu_stages import DecodeExchange
from edgeinfer_kernels.cuda.offload.exchange_buffer import ExchangeBuffer
from edgeinfer_kernels.cuda.tuning.step_shapes import Tuning
from edgeinfer_kernels.cuda.weights.device_model import DeviceModel
from edgeinfer_kernels.one_layer import one_layer
from edgeinfer_kernels.stages import CpuStages

STAGES = 32
ROUNDS = 5
TIMEOUT_SECONDS = 1.0
"""Timeout in seconds for a device that does not synchronize with its host."""
_FORMAT, _ROWS = "Q8_0", 32


class Exchange:
    """STAGES stages of one token, on the smallest possible model."""

    def __init__(self, device: torch.device) -> None:
        specification, weights = one_layer(_FORMAT, _ROWS)
        counting = Arena()
        Workspace(DeviceModel(specification, weights, counting, 16), counting)
        self.arena = Arena(device, counting.used)
        model = DeviceModel(specification, weights, self.arena, 16)
        self.exchange_buffer = ExchangeBuffer(device, 1, specification.hidden_size, 0)
        self._launches = StepLaunches(model, Workspace(model, self.arena), Tuning(), dependent=False)
        self._exchange = DecodeExchange(CpuStages((), (), ()), self.exchange_buffer)
        self._norm = NextNorm(specification.norm, None, None)

    def launch(self) -> None:
        """Launch all stages; the first has number 1."""
        out = self._launches.workspace.normed_input[0]
        for stage in range(1, STAGES + 1):
            self._exchange.send(self._launches, stage, 1)
            self._exchange.receive(self._launches, stage, None, 0.0, self._norm, out, 1)

    def respond(self) -> bool:
        """Answer each stage as soon as it is reached; False: timeout, and the device was released."""
        words = self.exchange_buffer.words.numpy()
        for stage in range(1, STAGES + 1):
            deadline = time.perf_counter() + TIMEOUT_SECONDS
            while words[SENT] < stage:
                if time.perf_counter() > deadline:
                    self.exchange_buffer.open()
                    return False
            words[ANSWERED] = stage
        return True


def stage_seconds(device: torch.device) -> float | None:
    """Seconds of a stage without work on the host, for sending and receiving hidden states; None: device and
    host do not see each other's writes until a graph has ended.
    """
    with current(device):
        return _stage_seconds(device)


def _stage_seconds(device: torch.device) -> float | None:
    exchange = Exchange(device)
    try:
        exchange.exchange_buffer.open()
        begin = time.perf_counter()
        exchange.launch()
        if device.type != "cuda":
            return (time.perf_counter() - begin) / STAGES
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with capturing(device, graph):
            exchange.launch()
        rounds = [_round(exchange, graph, device) for _ in range(ROUNDS)]
        del graph
        seconds = [each for each in rounds if each is not None]
        return min(seconds) / STAGES if len(seconds) == ROUNDS else None
    finally:
        exchange.arena.close()


def _round(exchange: Exchange, graph: torch.cuda.CUDAGraph, device: torch.device) -> float | None:
    exchange.exchange_buffer.begin(answered=0)
    begin = time.perf_counter()
    graph.replay()
    met = exchange.respond()
    torch.cuda.synchronize(device)
    return time.perf_counter() - begin if met else None
