"""Measures the sums of tensor parallel: of a step in a graph, and of a chunk of a prompt."""

import time

import torch

from edgeinfer_kernels.cuda.current_device import capturing
from edgeinfer_kernels.cuda.tensor.peer_trial import StepSums
from edgeinfer_kernels.cuda.tensor.torch_collective import TorchCollective
from edgeinfer_kernels.cuda.tuning.step_timer import replay_seconds

STEP_FLOATS, PROMPT_TOKENS, PROMPT_FLOATS = 4096, 512, 8192
"""The hidden states of a token of an 8B, and of a chunk of a 70B."""
SUMS_PER_GRAPH, REPLAYS, ROUNDS = 64, 8, 3


def sum_speed(collective: TorchCollective, device: torch.device) -> tuple[float, float]:
    """Seconds of a sum of a step, and bytes per second of one of a chunk. All ranks measure together."""
    step = collective.shared(torch.zeros((1, STEP_FLOATS), dtype=torch.float32, device=device), 16)
    prompt = torch.zeros((PROMPT_TOKENS, PROMPT_FLOATS), dtype=torch.float32, device=device)
    chunks = collective.chunk_sums(*prompt.shape)
    sums = None if collective.peers is None else StepSums(collective.peers, 1)
    if device.type != "cuda":
        seconds = [_timed(collective, rows) for rows in (step, prompt)]
        return seconds[0], prompt.nbytes / seconds[1]
    graphs = []

    def sum_of_step() -> None:
        if sums is None:
            collective.sum_of_step(step)
        else:
            sums.add_up()

    def add_up() -> None:
        if chunks is None:
            collective.add_up(prompt)
        else:
            chunks.add_up(0, PROMPT_FLOATS, prompt)
            chunks.finish()

    for run in (sum_of_step, add_up):
        run()
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with capturing(device, graph):
            for _ in range(SUMS_PER_GRAPH):
                run()
        graph.replay()
        graphs.append(graph)
    small, large = (
        min(replay_seconds(graph, REPLAYS) for _ in range(ROUNDS)) / SUMS_PER_GRAPH for graph in graphs
    )
    return small, prompt.nbytes / large


def _timed(collective: TorchCollective, rows: torch.Tensor) -> float:
    """The least seconds of a sum."""
    durations = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        collective.add_up(rows)
        durations.append(time.perf_counter() - begin)
    return min(durations)
