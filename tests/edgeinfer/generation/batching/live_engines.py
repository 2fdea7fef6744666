"""Engines, requests and arrivals for tests of the scheduler."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.generation.batching.scheduler import Scheduler, requests_on
from edgeinfer.generation.loop import LiveRequest
from edgeinfer.generation.request import Request
from edgeinfer.model_config.weights import read_config, read_weights
from edgeinfer.options import SamplingParams
from edgeinfer.results import Token
from edgeinfer.speculation.speculator import Speculator
from edgeinfer.tokenizer import Tokenizer
from edgeinfer_kernels.decoder_state import DecoderState
from edgeinfer_quant_formats import GGUFFile
from tests.kernels.cpu.test_cpu_backend import Build, exact
from tests.random_models import VOCABULARY, vocabulary_metadata

CONTEXT = 128
TOKENIZER = Tokenizer.from_metadata(vocabulary_metadata())


def engine_of(
    path: Path,
    build: Build = exact,
    positions: int = CONTEXT,
    others: int = 0,
    context: int = CONTEXT,
    batch: int = 32,
) -> NativeEngine:
    """An engine for a file, with caches of `positions` tokens, and `others` for further sequences; `batch`:
    maximum tokens of a step.
    """
    file = GGUFFile.open(path)
    config = read_config(file)
    spec = config.specification()
    pool = DecoderState.allocate(spec, positions, "f32").pooled(1 + others)
    backend = build(spec, read_weights(file, config), pool.states[0])
    engine = NativeEngine(spec, backend, context, batch, positions=positions)
    engine.join(pool)
    return engine


def prompt(length: int, seed: int = 0) -> list[int]:
    """Random ids."""
    return [int(token) for token in np.random.default_rng(seed).integers(3, VOCABULARY, length)]


def request(ids: Sequence[int], tokens: int = 20, **options: Any) -> Request:
    """A request; `options` of the request, and of its sampling."""
    sampling: dict[str, Any] = {"temperature": 0.0}
    sampling |= {name: options.pop(name) for name in ("temperature", "seed", "top_k") if name in options}
    return Request(
        list(ids),
        SamplingParams.from_keywords(sampling),
        max_tokens=tokens,
        **options,
    )


@dataclass
class Run:
    """Requests of one engine, which arrive before given steps."""

    engine: NativeEngine
    speculator: Speculator | None = None
    live: list[LiveRequest] = field(default_factory=list)
    tokens: list[list[Token]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(lambda: requests_on(self.engine, TOKENIZER, False))

    def add(self, requested: Request) -> LiveRequest:
        """Add a request, which advances in each step."""
        live = LiveRequest(self.engine, TOKENIZER, requested, self.speculator, lambda: None)
        self.live.append(live)
        self.tokens.append([])
        self.scheduler.add(live)
        return live

    def step(self) -> None:
        self.scheduler.step()
        for live, tokens in zip(self.live, self.tokens, strict=True):
            tokens += live.unread
            live.unread.clear()

    def pull(self, live: LiveRequest) -> None:
        """A step that a waiting reader of a pulled request makes."""
        live.is_awaited = True
        self.step()
        live.is_awaited = False

    def finish(self, arrivals: Mapping[int, Sequence[Request]] | None = None) -> list[list[int]]:
        """The ids of each request, when all have ended; `arrivals`: those that are added before a step."""
        waiting = dict(arrivals or {})
        for step in range(10_000):
            for requested in waiting.pop(step, ()):
                self.add(requested)
            self.step()
            if not waiting and not self.scheduler.live:
                return [[token.id for token in tokens] for tokens in self.tokens]
        raise AssertionError("a request never ends")


def alone(path: Path, requests: Sequence[Request], build: Build = exact) -> list[list[int]]:
    """The ids of each request on a new engine."""
    results = []
    for requested in requests:
        results += Run(engine_of(path, build)).finish({0: [requested]})
    return results
