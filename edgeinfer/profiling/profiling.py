"""Profiles a model on text: counts active neurons, evaluates the counts, and saves them next to the model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeinfer.errors import SettingError
from edgeinfer.loading.loading import load
from edgeinfer.model import Model
from edgeinfer.profiling.predictor_training import Samples, TrainedPredictor, predictor_arrays, train
from edgeinfer.profiling.recording import (
    EXACT_RULE,
    WINDOW,
    SeenRows,
    TextPartCounts,
    cpu_engine,
    generated_texts,
    record,
    rule_of,
    windows_of,
)
from edgeinfer.registry.registry import find_model
from edgeinfer.user_folders import user_folder
from edgeinfer_kernels.backend import Activations
from edgeinfer_kernels.blocks.feed_forward import FeedForwardSpec, FeedForwardWeights
from edgeinfer_kernels.blocks.moe import MoeSpec
from edgeinfer_kernels.cpu.sparse import dense_layer
from edgeinfer_offload.runtime.activity_profile import (
    EXPERT_NEURONS,
    ActivityProfile,
    model_hash,
    save_profile,
)
from edgeinfer_offload.runtime.concentration import Coverage, coverage

TEXT_TOKENS = 8192
PREDICTOR_TOKENS = 4096
"""Number of tokens whose x is kept in memory for training, as float16."""
DEFAULT_RANKS = (32, 64, 128, 256)
MIN_TOKENS = 64

Report = Callable[[str, int, int], None]
"""Called with the current task, and its done and total amounts."""


@dataclass(frozen=True)
class Profiling:
    """The counts and their evaluation."""

    path: Path
    profile: ActivityProfile
    layers: tuple[Coverage, ...]
    overall: Coverage
    predictors: tuple[TrainedPredictor, ...] = ()
    in_experts: float | None = None
    """Mean share of the neurons of a used expert that are active; None: it has none that are exactly zero."""


def profile(
    model: str | Path | None = None,
    texts: Sequence[str] = (),
    *,
    tokens: int = TEXT_TOKENS,
    predictor: bool = False,
    rank: int | None = None,
    report: Report | None = None,
    **loading: Any,
) -> Profiling:
    """Run `model` over `texts` (by default, over text that it generates), count which neurons are active, and
    save the counts next to the model, or in the user's data folder.

    `tokens`: maximum tokens of text. `predictor`: also train predictors, of `rank`, or of the rank with the
    lowest cost. `loading`: further keywords of `edgeinfer.load`.

    Raises:
        SettingError: a setting out of its range, a text too short, predictors for a model without ReLU.
        OSError: the profile can't be written.
        EdgeInferError: the errors of `edgeinfer.load`.
    """
    _check(tokens, rank)
    model_file = find_model(model)
    with load(model, device="cpu", sparse="off", draft=None, **loading) as loaded:
        loaded.refuse_encoder()
        windows = _windows(loaded, texts, tokens)
        made, samples = _counted(loaded, windows, predictor, report)
        made = replace(made, model_hash=model_hash(model_file.path))
        trained: list[TrainedPredictor] = []
        if predictor:
            found_weights = cpu_engine(loaded)[1].weights
            weights = [dense_layer(found_weights, layer) for layer in range(len(found_weights.layers))]
            trained = _trained(weights, samples, rank, report)
            arrays = {name: value for layer, each in enumerate(trained)
                      for name, value in predictor_arrays(layer, each).items()}  # fmt: skip
            made = replace(made, arrays=arrays)
    in_data_folder = model_file.source == "built in"  # the package folder must not be modified
    path = save_profile(made, model_file.path, user_folder("data"), in_data_folder)
    return profiling_of(made, path, trained)


def profiling_of(made: ActivityProfile, path: Path, trained: Sequence[TrainedPredictor] = ()) -> Profiling:
    """The evaluation of a profile, per layer and overall."""
    by_layer = made.layers("neurons") | made.layers("experts")
    counts = [by_layer[layer] for layer in sorted(by_layer)]
    each = tuple(coverage([layer], made.tokens) for layer in counts)
    uses = sum(int(value.sum()) for value in made.layers("experts").values())
    inside = made.layers(EXPERT_NEURONS)
    neurons = [value.shape[1] / made.counts[f"experts.{layer}"].shape[1] for layer, value in inside.items()]
    active = sum(int(value.sum()) for value in inside.values())
    in_experts = active / max(uses * neurons[0], 1) if neurons else None
    return Profiling(path, made, each, coverage(counts, made.tokens), tuple(trained), in_experts)


def _check(tokens: int, rank: int | None) -> None:
    if tokens < MIN_TOKENS:
        raise SettingError(f"tokens: saw {tokens}, wanted a whole number of at least {MIN_TOKENS}")
    if rank is not None and (rank < 32 or rank % 32):
        raise SettingError(f"rank: saw {rank}, wanted a multiple of 32")


def _windows(model: Model, texts: Sequence[str], tokens: int) -> list[list[int]]:
    """The text in windows that fit the context; at least two, one for each half."""
    if not texts:
        return generated_texts(model, tokens)
    ids = [token for text in texts for token in model.tokenizer.encode(text)][:tokens]
    if len(ids) < MIN_TOKENS:
        raise SettingError(f"the text has {len(ids)} tokens, wanted at least {MIN_TOKENS}; give a longer one")
    return windows_of(ids, min(WINDOW, model.context, -(-len(ids) // 2)))


def _counted(
    model: Model, windows: Sequence[Sequence[int]], keep: bool, report: Report | None
) -> tuple[ActivityProfile, list[Samples]]:
    """The counts of both parts of the text; and x and activity of all layers, if `keep`."""
    specification = cpu_engine(model)[0].specification
    specs = [*specification.specs(FeedForwardSpec), *specification.specs(MoeSpec)]
    rules = sorted(set(map(rule_of, specs)))
    if keep and rules != [EXACT_RULE]:
        kinds = {"a mixture" if isinstance(spec, MoeSpec) else spec.activation for spec in specs}
        raise SettingError(
            f"{model.name}: predictors need a ReLU; its activation is {', '.join(sorted(kinds))}"
        )
    part_counts, layer_samples = (
        (TextPartCounts(), TextPartCounts()),
        [_LayerSamples() for _ in specification.layers],
    )
    for number, part in enumerate(_halved(windows)):

        def seen(layer: int, rows: SeenRows, counted: TextPartCounts = part_counts[number]) -> None:
            counted.add(layer, rows)
            if rows.normed is not None and keep:
                layer_samples[layer].add(rows.normed, rows.active)

        record(model, part, seen, _named(report, f"reading half {number + 1} of the text"))
    names = {}
    for index in specification.indices():
        block, layer = specification.residual(index).block, index.layer
        if isinstance(block, FeedForwardSpec | MoeSpec):
            kind = "experts" if isinstance(block, MoeSpec) else "neurons"
            names[f"{kind}.{layer}"] = np.stack([part.counts[layer] for part in part_counts])
    for layer in part_counts[0].inside:
        stacked = [part.inside[layer].reshape(-1) for part in part_counts]
        names[f"{EXPERT_NEURONS}.{layer}"] = np.stack(stacked)
    made = ActivityProfile("", (part_counts[0].tokens, part_counts[1].tokens), "; ".join(rules), names)
    return made, [each.samples() for each in layer_samples] if keep else []


class _LayerSamples:
    """One layer's x and activity, by token."""

    def __init__(self) -> None:
        self._x: list[npt.NDArray[np.float16]] = []
        self._active: list[npt.NDArray[np.uint8]] = []

    def add(self, normed: Activations, active: npt.NDArray[np.bool_]) -> None:
        self._x.append(normed.astype(np.float16))
        self._active.append(np.packbits(active, axis=1))

    def samples(self) -> Samples:
        x, active = np.concatenate(self._x), np.concatenate(self._active)
        step = -(-len(x) // PREDICTOR_TOKENS)
        return Samples(x[::step], active[::step])


def _halved(windows: Sequence[Sequence[int]]) -> tuple[list[Sequence[int]], list[Sequence[int]]]:
    """The windows of the first and of the second half of the tokens; the one in the middle is divided."""
    text_parts: tuple[list[Sequence[int]], list[Sequence[int]]] = ([], [])
    left = sum(map(len, windows)) // 2
    for window in windows:
        for part, ids in zip(text_parts, (window[:left], window[left:]), strict=True):
            if ids:
                part.append(ids)
        left -= min(left, len(window))
    return text_parts


def _trained(
    weights: Sequence[FeedForwardWeights], samples: Sequence[Samples], rank: int | None, report: Report | None
) -> list[TrainedPredictor]:
    """A predictor for each layer: of the given rank, or of the one that reads the fewest weights."""
    predictors = []
    for layer, (each, sample) in enumerate(zip(weights, samples, strict=True)):
        width = each.ffn_up.columns
        ranks = [rank] if rank else [r for r in DEFAULT_RANKS if r <= width // 2] or [32]
        predictors.append(min(train(each, sample, ranks), key=partial(_cost, each)))
        if report:
            report("training predictors", layer + 1, len(weights))
    return predictors


def _cost(weights: FeedForwardWeights, trained: TrainedPredictor) -> float:
    """Bytes per token to find the active neurons: the predictor, and the rows of the neurons it predicts."""
    matrix = weights.ffn_gate or weights.ffn_up
    return trained.predictor.nbytes + trained.named * matrix.nbytes


def _named(report: Report | None, label: str) -> Callable[[int, int], None] | None:
    return None if report is None else lambda done, total: report(label, done, total)
