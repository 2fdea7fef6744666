"""How the time of a decoded token divides: CPU work by block, predictor, waiting for the GPU, and the rest.

The CPU's blocks run one by one and are timed, in turns with normal tokens. What the timing adds is measured
and subtracted evenly from the blocks, so the parts add up to a normal token. Normal runs are not timed so.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import addressof, c_float
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from edgeinfer.benchmarking.tables import NOTHING
from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.model import Model
from edgeinfer_kernels.blocks.feed_forward import FeedForwardSpec
from edgeinfer_kernels.blocks.moe import MoeSpec
from edgeinfer_kernels.cpu.backend import CpuBackend
from edgeinfer_kernels.cpu.cpu_shard import CpuShard
from edgeinfer_kernels.cpu.decoder import CpuDecoder
from edgeinfer_kernels.cpu.runtime.block_args import SparseArgs
from edgeinfer_kernels.cpu.runtime.kernel_args import ANSWERED, LOST, SENT, MatrixArgs
from edgeinfer_kernels.decoder import BlockIndex, DecoderSpec
from edgeinfer_offload.runtime.split_backend import SplitBackend

HEAD = (
    "model", "active", "budget", "threads", "way", "token ms", "CPU: attention", "CPU: feed-forward",
    "of it predictor", "waiting for the GPU", "GPU alone", "waiting less GPU alone", "rest", "timing added",
)  # fmt: skip
SPARSE_KERNEL = "sparse_feed_forward_block"
NEVER = -1e30
"""A bias with which the predictor names no neuron."""
PREDICTOR_ROUNDS = 20
UNCOUNTED = 8
"""The first eighth of the tokens isn't counted."""
LANES = 16
"""Biases are padded to as many."""


@dataclass(frozen=True)
class TimeSplit:
    """Median seconds of a token; the parts but `predictor` and `gpu_alone` add up to `token`.

    predictor: part of `feed_forward`, its two products; None: there is none. waiting, gpu_alone: None
    without a GPU. `waiting`: from the start of a step to its end on the GPU, without the CPU's blocks: GPU
    kernels that the CPU waits for, and the exchange. Where the GPU works during the CPU's blocks, it is
    shorter than `gpu_alone`. rest: embedding, sampling and Python; without a GPU also the head.
    timing: what the timing added, not in the parts.
    """

    token: float
    attention: float
    feed_forward: float
    predictor: float | None
    waiting: float | None
    gpu_alone: float | None
    rest: float
    timing: float

    def cells(self) -> list[str]:
        """The cells under HEAD from the token on, in milliseconds."""
        less = None if self.waiting is None or self.gpu_alone is None else self.waiting - self.gpu_alone
        parts = (self.token, self.attention, self.feed_forward, self.predictor, self.waiting, self.gpu_alone,
                 less, self.rest, self.timing)  # fmt: skip
        return [NOTHING if part is None else f"{1000 * part:.3f}" for part in parts]


@dataclass
class BlockTimes:
    """Seconds of the CPU's blocks, of each timed token, and how many blocks a token has."""

    attention: list[float] = field(default_factory=list)
    feed_forward: list[float] = field(default_factory=list)
    attentions: int = 0
    feed_forwards: int = 0

    def begin_token(self) -> None:
        """The following blocks are those of the next token."""
        self.attention.append(0.0)
        self.feed_forward.append(0.0)
        self.attentions = self.feed_forwards = 0

    def add(self, spec: DecoderSpec, index: BlockIndex, seconds: float) -> None:
        """A block took this time."""
        if isinstance(spec.residual(index).block, (FeedForwardSpec, MoeSpec)):
            self.feed_forward[-1] += seconds
            self.feed_forwards += 1
        else:
            self.attention[-1] += seconds
            self.attentions += 1

    def corrected(self, timing: float) -> tuple[float, float]:
        """Median seconds of attention and feed-forwards without what the timing added to all blocks."""
        each = timing / max(1, self.attentions + self.feed_forwards)
        first = len(self.attention) // UNCOUNTED
        attention = median(self.attention[first:]) - each * self.attentions
        return attention, median(self.feed_forward[first:]) - each * self.feed_forwards


class TimedShard:
    """A CPU shard whose blocks are timed; a host of the GPU."""

    def __init__(self, shard: CpuShard, words: Any) -> None:
        self.times = BlockTimes()
        self._shard, self._words = shard, words

    def serve(self, tokens: int, start: int) -> None:
        """As `CpuShard.serve`."""
        self._shard.begin_step(tokens, start)
        for stage in range(1, len(self._shard.stages) + 1):
            while stage > 1 and self._words[SENT] < stage and not self._words[LOST]:
                pass
            self._run(stage)
            self._words[ANSWERED] = stage

    def run_stage(self, stage: int, tokens: int, start: int) -> None:
        """As `CpuShard.run_stage`."""
        self._shard.begin_step(tokens, start)
        self._run(stage)

    def _run(self, stage: int) -> None:
        shard = self._shard
        for index, run in shard.steps[stage - 1]:
            begin = time.perf_counter()
            shard.pool.run(*run)
            self.times.add(shard.spec, index, time.perf_counter() - begin)


def time_split(model: Model, ids: Sequence[int], gpu_alone: float | None) -> TimeSplit | None:
    """How the time of a token divides, over these tokens; None: it isn't known for this engine. `gpu_alone`:
    seconds of the GPU's part of a token without the CPU's.
    """
    backend = model.engine.backend if isinstance(model.engine, NativeEngine) else None
    model.engine.rewind(0)
    if isinstance(backend, SplitBackend):
        return _of_split(backend, ids, gpu_alone)
    return _on_cpu(backend, ids) if isinstance(backend, CpuBackend) else None


def _of_split(backend: SplitBackend, ids: Sequence[int], gpu_alone: float | None) -> TimeSplit:
    shard, steps = backend.cpu_shard, backend.gpu_shard.steps
    host, exchange = steps.host, steps.step.exchange
    assert exchange is not None
    timed = TimedShard(shard, exchange.exchange_buffer.words.numpy())

    def token(position: int) -> None:
        backend.sample_next(ids[position], position)

    def step(position: int) -> None:
        shard.embed([ids[position]])
        backend.gpu_shard.enter([ids[position]], position)

    def timed_step(position: int) -> None:
        timed.times.begin_token()
        steps.host = timed
        try:
            step(position)
        finally:
            steps.host = host

    whole, plain, slow = _median_seconds((token, step, timed_step), len(ids))
    attention, feed_forward = timed.times.corrected(slow - plain)
    runs = {index: run for stage in shard.steps for index, run in stage}
    shard.begin_step(1, 0)
    predictor = _predictor_seconds(shard.decoder, lambda index: shard.pool.run(*runs[index]))
    waiting, rest = plain - attention - feed_forward, whole - plain
    return TimeSplit(whole, attention, feed_forward, predictor, waiting, gpu_alone, rest, slow - plain)


def _on_cpu(backend: CpuBackend, ids: Sequence[int]) -> TimeSplit:
    times, spec = BlockTimes(), backend.spec

    def token(position: int) -> None:
        backend.step_logits([ids[position]], position)

    def timed_token(position: int) -> None:
        times.begin_token()
        x = backend.embed([ids[position]])
        for index in spec.indices():
            begin = time.perf_counter()
            backend.run_block(index, x, position)
            times.add(spec, index, time.perf_counter() - begin)
        backend.logits(x)

    plain, slow = _median_seconds((token, timed_token), len(ids))
    attention, feed_forward = times.corrected(slow - plain)
    x = backend.embed([ids[0]])
    predictor = _predictor_seconds(backend.decoder, lambda index: backend.run_block(index, x, 0))
    rest = plain - attention - feed_forward
    return TimeSplit(plain, attention, feed_forward, predictor, None, None, rest, slow - plain)


def _median_seconds(steps: Sequence[Callable[[int], None]], tokens: int) -> list[float]:
    """Median seconds of each of these steps, in turns, over the positions after the first ones."""
    seconds: list[list[float]] = [[] for _ in steps]
    for position in range(tokens):
        for step, spent in zip(steps, seconds, strict=True):
            begin = time.perf_counter()
            step(position)
            spent.append(time.perf_counter() - begin)
    return [median(spent[len(spent) // UNCOUNTED :]) for spent in seconds]


def _predictor_seconds(decoder: CpuDecoder, run_block: Callable[[BlockIndex], None]) -> float | None:
    """Median seconds of the two products of all predictors of a token: of feed-forwards whose predictors name
    no neuron, with these products less without them, in turns. None: there is no predictor.
    """
    found = {
        index: SparseArgs.from_address(call.block)
        for index, calls in decoder.calls.items()
        for call in calls
        if call.kernel == SPARSE_KERNEL
    }
    found = {index: args for index, args in found.items() if args.predictor_second}
    if not found:
        return None
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for turn in range(2 * PREDICTOR_ROUNDS):
        with_products = turn % 2 == 0
        with _naming_nothing(list(found.values()), with_products=with_products):
            begin = time.perf_counter()
            for index in found:
                run_block(index)
            seconds[with_products].append(time.perf_counter() - begin)
    return median(seconds[True]) - median(seconds[False])


@contextmanager
def _naming_nothing(layers: Sequence[SparseArgs], *, with_products: bool) -> Iterator[None]:
    """Predictors name no neuron; without the products, they multiply nothing."""
    matrices = [MatrixArgs.from_address(args.predictor_second) for args in layers]
    kept = [
        (args.predictor_bias, args.rank, matrix.columns)
        for args, matrix in zip(layers, matrices, strict=True)
    ]
    neurons = max(matrix.rows for matrix in matrices)
    never = (c_float * (neurons + LANES))(*[NEVER] * (neurons + LANES))
    try:
        for args, matrix in zip(layers, matrices, strict=True):
            args.predictor_bias = addressof(never)
            if not with_products:
                args.rank = matrix.columns = 0
        yield
    finally:
        for args, matrix, values in zip(layers, matrices, kept, strict=True):
            args.predictor_bias, args.rank, matrix.columns = values
