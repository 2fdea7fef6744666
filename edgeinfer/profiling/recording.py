"""Runs a model over text layer by layer, and records the activity of every feed-forward."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeinfer.engine.native_engine import NativeEngine
from edgeinfer.errors import SettingError
from edgeinfer.model import Model
from edgeinfer.profiling.activity_counts import add_in_experts
from edgeinfer_kernels.backend import Activations
from edgeinfer_kernels.blocks.feed_forward import RELU_ACTIVATIONS, Activation, FeedForwardSpec
from edgeinfer_kernels.blocks.moe import MoeSpec
from edgeinfer_kernels.cpu.backend import CpuBackend

WINDOW = 512
GENERATED_TOKENS = 256
EXACT_RULE = "not exactly zero"
ROUTED_RULE = "an expert that the router selected"
MAGNITUDE_RULE = "at least the root mean square of its row"

Report = Callable[[int, int], None]


@dataclass(frozen=True)
class SeenRows:
    """What a step activated in a layer: its active neurons (tokens, neurons) or used experts (tokens,
    experts), and either its normed x (tokens, hidden size) or, of ReLU experts, `inside`: their numbers
    (tokens, experts per token), and the rows of their down projections (tokens, experts per token, neurons).
    """

    active: npt.NDArray[np.bool_]
    normed: Activations | None = None
    inside: tuple[npt.NDArray[np.int64], Activations] | None = None


Seen = Callable[[int, SeenRows], None]
"""Called with a layer and its rows."""


@dataclass
class TextPartCounts:
    """The counts of one of the two parts of the text."""

    tokens: int = 0
    counts: dict[int, npt.NDArray[np.uint32]] = field(default_factory=dict)
    inside: dict[int, npt.NDArray[np.uint32]] = field(default_factory=dict)
    """Counts (experts, neurons) of the layers with ReLU experts."""

    def add(self, layer: int, rows: SeenRows) -> None:
        """Add the activity rows of a layer; tokens are counted at the first layer."""
        counts = rows.active.sum(axis=0, dtype=np.uint32)
        self.counts[layer] = self.counts[layer] + counts if layer in self.counts else counts
        self.tokens += len(rows.active) if layer == min(self.counts) else 0
        if rows.inside is not None:
            experts, hidden = rows.inside
            zeros = np.zeros((rows.active.shape[1], hidden.shape[2]), np.uint32)
            add_in_experts(self.inside.setdefault(layer, zeros), hidden, experts)


def windows_of(ids: Sequence[int], window: int) -> list[list[int]]:
    """The text in windows, each processed with an empty cache."""
    return [list(ids[first : first + window]) for first in range(0, len(ids), window)]


def generated_texts(model: Model, tokens: int) -> list[list[int]]:
    """Generated texts of the model, of `tokens` tokens in total; with fixed seeds.

    Raises:
        SettingError: the model ends every text at once.
    """
    tokenizer, seed = model.tokenizer, 0
    texts: list[list[int]] = []
    start = [tokenizer.bos_id if tokenizer.bos_id is not None else tokenizer.eos_id or 0]
    limit = min(GENERATED_TOKENS, model.context - 1)
    while sum(len(text) for text in texts) < tokens:
        completion = model.generate(
            start, max_tokens=limit, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=seed
        )
        seed += 1
        if len(completion.ids) > 1:
            texts.append([*start, *completion.ids])
        elif seed > 16 and not texts:
            raise SettingError(f"{model.name} generates nothing without a prompt; give a text (text=)")
    excess = sum(map(len, texts)) - tokens
    return [*texts[:-1], texts[-1][: len(texts[-1]) - excess]]


def cpu_engine(model: Model) -> tuple[NativeEngine, CpuBackend]:
    """The engine of a model on the CPU kernels. Raises `SettingError` for any other."""
    engine = model.engine
    if not isinstance(engine, NativeEngine) or not isinstance(engine.backend, CpuBackend):
        raise SettingError(f"{model.name}: only a model on the CPU can be profiled; add device='cpu'")
    return engine, engine.backend


def record(model: Model, windows: Sequence[Sequence[int]], seen: Seen, report: Report | None = None) -> None:
    """Process every window with an empty cache; `seen` is called for each layer of each step."""
    engine, backend = cpu_engine(model)
    for done, window in enumerate(windows):
        engine.rewind(0)
        for ids in _steps(window, engine.batch):
            start, x = len(engine.ids), backend.embed(ids)
            for index in engine.specification.indices():
                backend.run_block(index, x, start)
                spec, layer = engine.specification.residual(index).block, index.layer
                if isinstance(spec, MoeSpec):
                    inside = None
                    if spec.activation in RELU_ACTIVATIONS:
                        inside = backend.decoder.expert_rows(index, len(ids))
                    routed = routed_experts(backend, layer, len(ids), spec.experts)
                    seen(layer, SeenRows(routed, inside=inside))
                elif isinstance(spec, FeedForwardSpec):
                    normed, hidden = backend.decoder.feed_forward_rows(layer, len(ids))
                    seen(layer, SeenRows(active_neurons(hidden, spec.activation), normed))
            engine.cache.append(ids)
        if report:
            report(done + 1, len(windows))


def _steps(ids: Sequence[int], batch: int) -> Iterator[list[int]]:
    for first in range(0, len(ids), batch):
        yield list(ids[first : first + batch])


def routed_experts(backend: CpuBackend, layer: int, tokens: int, experts: int) -> npt.NDArray[np.bool_]:
    """The experts used by the tokens of the last step."""
    assert backend.routing is not None
    ids = backend.routing.ids[layer, :tokens]
    routed = np.zeros((tokens, experts + 1), np.bool_)
    routed[np.arange(tokens)[:, None], ids] = True  # NO_EXPERTS marks the last one, which is no expert
    return routed[:, :experts]


def active_neurons(hidden: npt.NDArray[Any], activation: Activation) -> npt.NDArray[np.bool_]:
    """Which neurons count as active: for ReLU families the nonzero ones, otherwise those with at least the
    root mean square magnitude of the token's row.
    """
    if activation in RELU_ACTIVATIONS:
        return np.asarray(hidden != 0)
    return np.asarray(np.abs(hidden) >= np.sqrt(np.mean(hidden * hidden, axis=1, keepdims=True)))


def rule_of(spec: FeedForwardSpec | MoeSpec) -> str:
    """A description of the activity rule."""
    if isinstance(spec, MoeSpec):
        return ROUTED_RULE
    return EXACT_RULE if spec.activation in RELU_ACTIVATIONS else MAGNITUDE_RULE
