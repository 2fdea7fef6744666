"""Trains predictors of active neurons: a low-rank approximation of each layer's projection, and thresholds.

The input of the ReLU is z = W·x + b. Of all matrix products B·A of rank r, the best approximation of W on the
text minimizes Σ |W·x - B·A·x|². The singular vectors of W·C½ with C = Σ x·xᵀ give it (reduced-rank
regression, Izenman 1975). Neuron n is predicted active if (B·A·x)ₙ + bₙ + t·σₙ > 0, where σₙ is the standard
deviation of its error on that text. t is the smallest value that reaches the target recall on another part of
the text.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from edgeinfer_kernels.blocks.feed_forward import FeedForwardWeights
from edgeinfer_kernels.matrix import Matrix
from edgeinfer_kernels.neuron_predictor import NeuronPredictor
from edgeinfer_quant_formats import decode, encode

Floats = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]

RECALL = 0.985
"""Recall for which thresholds are chosen; slightly above the target, because other texts differ."""
FORMAT = "Q8_0"
RIDGE = 1e-4


@dataclass(frozen=True)
class Samples:
    """Recorded activations of one layer."""

    x: npt.NDArray[np.float16]
    """(tokens, hidden size), normed."""
    active: npt.NDArray[np.uint8]
    """(tokens, neurons) as packed bits."""

    def of(self, part: slice, neurons: int) -> tuple[Floats, Bools]:
        """x, and which neurons were active, for some of the tokens."""
        bits = np.unpackbits(self.active[part], axis=1, count=neurons)
        return self.x[part].astype(np.float32), bits.astype(np.bool_)


@dataclass(frozen=True)
class TrainedPredictor:
    """A predictor, and its quality on text that was used neither for its matrices nor its threshold."""

    predictor: NeuronPredictor
    recall: float
    """Share of the active neurons that it predicts active; NaN: unknown."""
    named: float
    """Share of all neurons that it predicts active."""
    active: float
    """Share of all neurons that are active."""


def train(weights: FeedForwardWeights, samples: Samples, ranks: Sequence[int]) -> list[TrainedPredictor]:
    """Predictors of these ranks, multiples of 32 and at most the hidden size.

    Fitted on the first half of the tokens; thresholds are chosen on the third quarter, quality is measured on
    the last.
    """
    matrix, bias = weights.ffn_gate or weights.ffn_up, weights.ffn_up_bias
    if weights.ffn_gate is not None:
        bias = weights.ffn_gate_bias
    tokens, neurons = len(samples.x), matrix.rows
    x, _ = samples.of(slice(0, tokens // 2), neurons)
    calibration = samples.of(slice(tokens // 2, tokens * 3 // 4), neurons)
    evaluation_samples = samples.of(slice(tokens * 3 // 4, tokens), neurons)
    w = matrix.decoded()
    target, (a, b) = x @ w.T, _factors(w, x)
    offset = np.zeros(neurons, np.float32) if bias is None else bias
    return [
        calibrated(a[:rank], b[:, :rank], offset, (x, target), calibration, evaluation_samples)
        for rank in ranks
    ]


def calibrated(
    first: Floats,
    second: Floats,
    offset: Floats,
    fitted: tuple[Floats, Floats],
    calibration: tuple[Floats, Bools],
    evaluation: tuple[Floats, Bools],
) -> TrainedPredictor:
    """The predictor second · first with the threshold that reaches RECALL.

    `offset`: the neurons' biases. `fitted`: x and W·x, from which each neuron's error is estimated. The
    threshold is chosen on `calibration`, quality is measured on `evaluation`: x and which neurons are active.
    """
    predictor = stored_predictor(first, second, offset)
    x, target = fitted
    spread = np.std(target - _predicted(predictor, x), axis=0) + np.float32(1e-6)
    threshold = _threshold(predictor, spread, *calibration)
    return evaluated(replace(predictor, bias=offset + threshold * spread), *evaluation)


def _predicted(predictor: NeuronPredictor, x: Floats) -> Floats:
    """B·A·x, (tokens, neurons)."""
    return np.asarray((x @ predictor.first.decoded().T) @ predictor.second.decoded().T, np.float32)


def _threshold(predictor: NeuronPredictor, spread: Floats, x: Floats, active: Bools) -> np.float32:
    """The threshold in standard deviations for which RECALL of the active neurons are predicted."""
    needed = (-(_predicted(predictor, x) + predictor.bias) / spread)[active]
    return np.float32(np.quantile(needed, RECALL) if len(needed) else 0)


def evaluated(predictor: NeuronPredictor, x: Floats, active: Bools) -> TrainedPredictor:
    """The quality of a predictor on these tokens."""
    named = _predicted(predictor, x) + predictor.bias > 0
    hits, all_active = int((named & active).sum()), int(active.sum())
    return TrainedPredictor(predictor, hits / max(all_active, 1), float(named.mean()), float(active.mean()))


def _factors(w: Floats, x: Floats) -> tuple[Floats, Floats]:
    """A (hidden size, hidden size) and B (neurons, hidden size). For any rank r, the product of the first r
    rows of A and columns of B is the best approximation of W on the rows of x.
    """
    metric = (x.T @ x).astype(np.float64) / max(len(x), 1)
    metric[np.diag_indices_from(metric)] += RIDGE * np.trace(metric) / len(metric) + 1e-12
    values, vectors = np.linalg.eigh(metric)
    root = vectors * np.sqrt(values)
    inverse = vectors / np.sqrt(values)
    seen = w.astype(np.float64) @ root
    _, directions = np.linalg.eigh(seen.T @ seen)
    best = directions[:, ::-1]
    return (best.T @ inverse.T).astype(np.float32), (seen @ best).astype(np.float32)


def stored_predictor(first: Floats, second: Floats, bias: Floats) -> NeuronPredictor:
    """The predictor of these matrices, in the format of predictors."""
    return NeuronPredictor(_stored(first, "first"), _stored(second, "second"), bias)


def _stored(values: Floats, name: str) -> Matrix:
    raw = encode(np.ascontiguousarray(values).reshape(-1), FORMAT).reshape(len(values), -1)
    return Matrix(f"predictor.{name}", FORMAT, len(values), values.shape[1], raw)


def predictor_arrays(layer: int, trained: TrainedPredictor) -> dict[str, npt.NDArray[Any]]:
    """A predictor as arrays for a profile."""
    predictor, name = trained.predictor, f"predictor.{layer}"
    quality = np.array([trained.recall, trained.named, trained.active])
    return {
        f"{name}.first": predictor.first.raw,
        f"{name}.second": predictor.second.raw,
        f"{name}.bias": predictor.bias,
        f"{name}.quality": quality,
    }


def read_predictor(
    arrays: Mapping[str, npt.NDArray[Any]], layer: int, matrix: Matrix
) -> TrainedPredictor | None:
    """The predictor of a layer whose gate (or up) is `matrix`; None if the profile has none.

    Raises:
        ValueError: arrays that don't fit this layer.
    """
    name = f"predictor.{layer}"
    if f"{name}.first" not in arrays:
        return None
    first, second, bias, quality = (
        arrays[f"{name}.{part}"] for part in ("first", "second", "bias", "quality")
    )
    rank = len(first)
    shapes = {
        "first": (first, (rank, matrix.columns // 32 * 34), np.uint8),
        "second": (second, (matrix.rows, rank // 32 * 34), np.uint8),
        "bias": (bias, (matrix.rows,), np.float32),
        "quality": (quality, (3,), np.float64),
    }
    for part, (array, shape, dtype) in shapes.items():
        if array.shape != shape or array.dtype != dtype or not rank or rank % 32:
            raise ValueError(f"{name}.{part}: {array.dtype} {array.shape}, wanted {np.dtype(dtype)} {shape}")
    matrices = (
        Matrix(f"{name}.first", FORMAT, rank, matrix.columns, np.asarray(first, np.uint8)),
        Matrix(f"{name}.second", FORMAT, matrix.rows, rank, np.asarray(second, np.uint8)),
    )
    values = [decode(each.raw.reshape(-1), FORMAT) for each in matrices]
    if not all(np.isfinite(value).all() for value in (*values, bias, quality)):
        raise ValueError(f"{name}: numbers that aren't finite")
    recall, named, active = (float(value) for value in np.asarray(quality, np.float64))
    return TrainedPredictor(NeuronPredictor(*matrices, np.asarray(bias, np.float32)), recall, named, active)
