"""What a planted model computes: its activity at run time, and how near other ways are to the dense one."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from edgeinfer.model import Model
from edgeinfer.profiling.predictor_training import TrainedPredictor, evaluated
from edgeinfer.profiling.recording import SeenRows, record
from harness.hot_neurons.planted_files import HOT_SHARE

Logits = npt.NDArray[np.float32]
START = 3
"""The first token, after the special ones."""


@dataclass(frozen=True)
class Agreement:
    """Logits compared with those of the dense model, over the same tokens."""

    divergence: float
    """Mean Kullback-Leibler divergence."""
    same_best: float
    """Share of the tokens with the same best token."""
    distance: float
    """The largest |difference|, relative to the deviation of the token's logits."""

    def cells(self) -> list[str]:
        """Three cells of a table."""
        return [f"{self.divergence:.1e}", f"{self.same_best:.1%}", f"{self.distance:.1e}"]


def greedy(model: Model, tokens: int) -> tuple[list[int], Logits]:
    """The tokens that a model decodes greedily one by one, and the logits after each of those read."""
    engine, ids, rows = model.engine, [START], []
    engine.rewind(0)
    for _ in range(tokens):
        rows.append(np.array(engine.append(ids[-1:]), np.float32))
        ids.append(int(rows[-1].argmax()))
    return ids[:-1], np.stack(rows)


def forced(model: Model, ids: Sequence[int]) -> Logits:
    """The logits after each of these tokens, decoded one by one."""
    model.engine.rewind(0)
    return np.stack([np.array(model.engine.append([token]), np.float32) for token in ids])


def agreement(logits: Logits, dense: Logits) -> Agreement:
    """How near logits (tokens, vocabulary) are to those of the dense model."""
    log_p, log_q = _log_softmax(dense), _log_softmax(logits)
    divergence = (np.exp(log_p) * (log_p - log_q)).sum(1)
    distance = np.abs(logits - dense).max(1) / dense.std(1)
    same = logits.argmax(1) == dense.argmax(1)
    return Agreement(float(divergence.mean()), float(same.mean()), float(distance.max()))


def _log_softmax(logits: Logits) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max(1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(1, keepdims=True)))


@dataclass(frozen=True)
class MeasuredActivity:
    """The activity of a model while it runs, means over layers."""

    active: float
    hot_cover: float
    """The share of the activations in the first HOT_SHARE of the neurons."""
    recall: float
    named: float
    """Of the predictor."""


def measured_activity(model: Model, ids: Sequence[int], trained: TrainedPredictor) -> MeasuredActivity:
    """The activity of all layers (of experts within those in use) on these tokens, and the quality of the
    predictor there; NaN: experts have none. `model`: dense, on the CPU.
    """
    found: list[tuple[float, float, float, float]] = []

    def seen(layer: int, rows: SeenRows) -> None:
        if rows.inside is not None:
            inside = rows.inside[1].reshape(-1, rows.inside[1].shape[2]) != 0
            hot = inside[:, : round(HOT_SHARE * inside.shape[1])].sum() / max(1, inside.sum())
            found.append((float(inside.mean()), float(hot), math.nan, math.nan))
            return
        assert rows.normed is not None
        active = rows.active
        quality = evaluated(trained.predictor, np.array(rows.normed), active)
        hot = active[:, : round(HOT_SHARE * active.shape[1])].sum() / max(1, active.sum())
        found.append((quality.active, float(hot), quality.recall, quality.named))

    record(model, [list(ids)], seen)
    return MeasuredActivity(*np.mean(found, axis=0).tolist())
